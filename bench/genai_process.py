"""`genai_loop.py` as a child process that generates on command."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOP = Path(__file__).parent / "genai_loop.py"
CACHE_GB = 2


class GenaiFailed(Exception):
    """The child ended early; its own message is on stderr."""


class GenaiProcess:
    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Generate `num_tokens` after each prompt, all together; prompts are part of the time."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._child.stdin.flush()
        done = self.read()
        if done["num_tokens"] != len(prompts) * num_tokens:
            raise GenaiFailed(f"{done['num_tokens']} tokens instead of {len(prompts) * num_tokens}")
        return float(done["num_tokens"] / done["seconds"])

    def read(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise GenaiFailed("the openvino-genai process has ended")
        return json.loads(line)


@contextmanager
def genai_process(python: Path, model: Path, threads: int) -> Iterator[GenaiProcess]:
    """Start with the interpreter of an environment that has openvino-genai; stop it at the end."""
    command = [str(python), str(LOOP), str(model), str(threads), str(CACHE_GB)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        process = GenaiProcess(child)
        try:
            process.read()
            yield process
        finally:
            child.terminate()

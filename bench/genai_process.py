"""`genai_child.py` as a child process: one that generates on command, and one that serves HTTP."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.genai_server import MODEL
from bench.server_process import RunningServer

ROOT = Path(__file__).parent.parent
CACHE_GB = 2


class GenaiFailed(Exception):
    """The child ended early; its own message is on stderr."""


class GenaiProcess:
    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def tokens_per_s(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, at_once: int
    ) -> float:
        """Generate `num_tokens` after each prompt, `at_once` at any time: the rate while the load
        lasts, reading prompts included."""
        assert self._child.stdin is not None
        work = {"prompts": prompts, "num_tokens": num_tokens, "at_once": at_once}
        self._child.stdin.write(json.dumps(work) + "\n")
        self._child.stdin.flush()
        done = _read(self._child)
        if done["num_tokens"] != len(prompts) * num_tokens:
            raise GenaiFailed(f"{done['num_tokens']} tokens instead of {len(prompts) * num_tokens}")
        return float(done["tokens_per_s"])


@contextmanager
def genai_process(python: Path, model: Path, threads: int) -> Iterator[GenaiProcess]:
    """Without HTTP. `python` is of an environment that has openvino-genai."""
    with _child(python, "loop", model, threads) as child:
        _read(child)
        yield GenaiProcess(child)


@contextmanager
def genai_over_http(python: Path, model: Path, threads: int) -> Iterator[RunningServer]:
    """On a free port, once it accepts."""
    with _child(python, "server", model, threads) as child:
        yield RunningServer(_read(child)["port"], MODEL, child.pid)


@contextmanager
def _child(python: Path, mode: str, model: Path, threads: int) -> Iterator["subprocess.Popen[str]"]:
    """Ended with the context."""
    command = [str(python.absolute()), "-m", "bench.genai_child", mode]
    command += [str(model.absolute()), str(threads), str(CACHE_GB)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        try:
            yield child
        finally:
            child.terminate()


def _read(child: "subprocess.Popen[str]") -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise GenaiFailed("the openvino-genai process has ended")
    return json.loads(line)

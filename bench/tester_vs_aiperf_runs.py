"""One run of each tester at the same operating point.

Both keep the same number of requests open, to the same path, each with a prompt of its own of the
same length, and force the same number of output tokens. Before what counts, each sends as many
requests as it keeps open: connections, imports and caches are warm then, on both sides.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

from bench.tester_vs_aiperf_figures import Figures, NotComparable, Wanted, of_aiperf, of_seen
from bench.tester_vs_aiperf_places import Place
from kvota.tools.load.asked import Asked
from kvota.tools.load.generator import Generator
from kvota.tools.load.sender import Sender

AIPERF: Final = Path(".venv-aiperf/bin/aiperf")
RUN_MAX_S: Final = 300.0
TRIES_MAX: Final = 5
EXPORT: Final = "profile_export_aiperf.json"


def prompts_of(place: Place, wanted: Wanted, key: str) -> list[str]:
    """Of the warm-up and of the run, no two alike, so that no prefix cache answers them."""
    chance = Random(key)
    num = wanted.concurrency + wanted.num_requests
    return [place.words.make(wanted.prompt_tokens, chance) for _ in range(num)]


class GeneratorLate(Exception):
    """kvota's tester refuses its own result, because the machine did not let it be in time."""


def run_kvota(place: Place, wanted: Wanted, seed: int) -> Figures:
    """What `kvota bench` measures with: its sender, its generator, its clock.

    A result that the tester itself refuses is said so and measured again. Raises NotComparable.
    """
    for at in range(TRIES_MAX):
        prompts = prompts_of(place, wanted, f"{seed}, try {at}")
        try:
            return asyncio.run(_kvota(place, wanted, prompts))
        except GeneratorLate as refusal:
            print(f"(measured again: {refusal})")
    raise NotComparable(f"kvota's tester refused {TRIES_MAX} results; the machine is too busy")


async def _kvota(place: Place, wanted: Wanted, prompts: Sequence[str]) -> Figures:
    """Raises NotComparable and GeneratorLate."""
    asked = _asked(prompts, wanted)
    async with Sender(place.url, model=place.model) as sender:
        generator = Generator(sender)
        await generator.keep(
            asked, wanted.concurrency, seconds=RUN_MAX_S, num_max=wanted.concurrency
        )
        run = await generator.keep(
            asked, wanted.concurrency, seconds=RUN_MAX_S, num_max=wanted.num_requests
        )
    figures = of_seen(run.seen, wanted)
    first_s = sorted(one.first_token_s or 0.0 for one in run.seen)
    if complaint := run.lag.complaint(first_s[len(first_s) // 2], first_s[-1]):
        raise GeneratorLate(complaint)
    return figures


def _asked(prompts: Sequence[str], wanted: Wanted) -> Iterator[Asked]:
    for prompt in prompts:
        yield Asked(
            prompt=prompt, max_tokens=wanted.output_tokens, prompt_tokens=wanted.prompt_tokens
        )


def run_aiperf(place: Place, wanted: Wanted, seed: int, tokenizer: Path, folder: Path) -> Figures:
    """The same by aiperf, in a process of its own that writes into `folder`, which is new.

    Raises NotComparable with the end of its output when it fails.
    """
    folder.mkdir()
    prompts = prompts_of(place, wanted, f"{seed}, aiperf")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts)
    )
    try:
        ended = subprocess.run(
            aiperf_command(place, wanted, tokenizer, folder),
            capture_output=True,
            text=True,
            timeout=RUN_MAX_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotComparable(f"aiperf: no end within {RUN_MAX_S:g} s") from error
    if ended.returncode != 0:
        last_words = (ended.stdout + ended.stderr)[-2000:]
        raise NotComparable(f"aiperf ended with {ended.returncode}:\n{last_words}")
    return of_aiperf((folder / EXPORT).read_text(), wanted)


def aiperf_command(place: Place, wanted: Wanted, tokenizer: Path, folder: Path) -> list[str]:
    """Lengths are counted by the server, for both testers: text read back can split otherwise."""
    flags = {
        "--model": place.model,
        "--url": place.url,
        "--endpoint-type": "completions",
        "--input-file": str(folder / "prompts.jsonl"),
        "--custom-dataset-type": "single-turn",
        "--dataset-sampling-strategy": "sequential",
        "--concurrency": str(wanted.concurrency),
        "--request-count": str(wanted.num_requests),
        "--warmup-request-count": str(wanted.concurrency),
        "--osl": str(wanted.output_tokens),
        "--tokenizer": str(tokenizer),
        "--ui": "none",
        "--output-artifact-dir": str(folder),
    }
    forced = {
        "ignore_eos": "true",
        "min_tokens": str(wanted.output_tokens),
        "temperature": "0",
    }
    command = [str(AIPERF), "profile", "--streaming", "--use-server-token-count"]
    command += ["--no-gpu-telemetry", "--no-server-metrics"]
    command += [part for flag in flags.items() for part in flag]
    return command + [
        part for name, value in forced.items() for part in ("--extra-inputs", f"{name}:{value}")
    ]

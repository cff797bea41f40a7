"""Does the memory beyond weights and KV stay under the bill's reserve, whatever the load?

    python -m bench.memory [MODEL] [--batch 512] [--running 64]

Runs the executor as the engine would, through every size that a pass can have: prompts, decodes,
mixed steps, long contexts, prompt logprobs, draws with everything that sampling has. All KV blocks
are written first, so that what grows afterwards is neither weights nor KV. For each kind of load it
prints what stayed resident, and the highest point on the way (VmHWM, reset before).

Takes two minutes on two cores. The exit status is 1 when the reserve is exceeded.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.machine import sentence, usable_threads
from kvota.core.plan import BlockCopy, Chunk, Draw, StepPlan
from kvota.core.request import SamplingParams
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.model.executor import OpenVinoExecutor
from kvota.model.load import load_model
from kvota.model.sampler import Sampler
from kvota.model.shapes import rounded_size
from kvota.sizing.memory import ACTIVATION_RESERVE_BYTES, resident_bytes, size

CONTEXT = 8192
NUM_BLOCKS = 600
BLOCK = 32
TOKEN = 100
DECODE_CONTEXT = 200
GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    top_p=0.9, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, logprobs=20
)

Load = tuple[str, Sequence[Sequence[Chunk]]]
"""What it is, and its steps."""


def prompt(length: int, start: int = 0, params: SamplingParams = GREEDY) -> Chunk:
    """A chunk of a prompt that draws after its last token, in blocks from 0 on."""
    tokens = [TOKEN] * (start + length)
    table = tuple(range(-(-(start + length) // BLOCK)))
    draw = Draw(params, 0, tokens, start + length)
    return Chunk(0, [TOKEN] * length, start, table, draws=(draw,))


def decode(number: int, params: SamplingParams = GREEDY) -> Chunk:
    """One token after `DECODE_CONTEXT`; sequences share blocks, which memory does not see."""
    tokens = [TOKEN] * (DECODE_CONTEXT + 1)
    table = tuple(range(number, number + DECODE_CONTEXT // BLOCK + 1))
    draw = Draw(params, 0, tokens, DECODE_CONTEXT)
    return Chunk(number, [TOKEN], DECODE_CONTEXT, table, draws=(draw,))


def sizes(largest: int) -> list[int]:
    """One number of tokens for each size that a pass of up to `largest` can have."""
    return sorted({rounded_size(num) for num in range(1, largest)} - {0} | {largest})


def loads(batch: int, running: int) -> Iterator[Load]:
    many = [decode(number) for number in range(running)]
    yield "prompts of every size", [[prompt(length)] for length in sizes(batch)]
    yield "decodes of every number", [many[:num] for num in range(1, running + 1)]
    yield (
        "prompts beside decodes",
        [[prompt(length - running), *many] for length in sizes(batch) if length > running],
    )
    starts = range(0, CONTEXT - batch, batch)
    yield f"a prompt of {CONTEXT:,} tokens", [[prompt(batch, start)] for start in starts]
    logprobs = [
        [
            Chunk(
                0, [TOKEN] * num, 0, tuple(range(num // BLOCK + 1)), prompt_logprobs=5, next_token=1
            )
        ]
        for num in sizes(batch)[:: 1 + len(sizes(batch)) // 40]
    ]
    yield "prompt logprobs", logprobs
    yield (
        "draws with everything",
        [[decode(number, EVERYTHING) for number in range(running)]] * 5,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    loaded = load_model(
        resolve(options.model, cache_dir_of(os.environ)), num_threads=usable_threads()
    )
    held = resident_bytes()
    sampler = Sampler(loaded.compiled.vocab_size, num_sampled=loaded.num_sampled)
    executor = loaded.compiled.executor(NUM_BLOCKS, sampler)
    _write_all_blocks(executor)
    planned = held + (NUM_BLOCKS + 1) * executor.capacity.bytes_per_block
    print(f"{sentence()}\nweights {loaded.weight_format}, {size(held)} held when loaded")
    most = _measure(executor, planned, loads(options.batch, options.running))
    is_kept = most <= ACTIVATION_RESERVE_BYTES
    word = "kept" if is_kept else "EXCEEDED"
    print(f"The reserve of {size(ACTIVATION_RESERVE_BYTES)} is {word}.")
    return 0 if is_kept else 1


def _measure(executor: OpenVinoExecutor, planned: int, loads: Iterable[Load]) -> int:
    """Run and print each; the highest point of all, in bytes beyond `planned`."""
    print(f"{'beyond weights and KV after':32}{'stays':>10}{'highest':>10}")
    most = 0
    for name, steps in loads:
        _forget_the_highest()
        for chunks in steps:
            executor.execute(StepPlan(chunks))
        stays, highest = resident_bytes() - planned, _highest_bytes() - planned
        most = max(most, highest)
        print(f"{name:32}{size(max(0, stays)):>10}{size(max(0, highest)):>10}", flush=True)
    return most


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.memory")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--running", type=int, default=64, help="max_running_requests")
    return parser.parse_args(arguments)


def _write_all_blocks(executor: OpenVinoExecutor) -> None:
    copies = [BlockCopy(0, number) for number in range(1, NUM_BLOCKS)]
    executor.execute(StepPlan([], copies))


def _forget_the_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _highest_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("This system does not say how much memory a process held at most (VmHWM).")


if __name__ == "__main__":
    sys.exit(main())

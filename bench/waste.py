"""How much allocated KV memory holds nothing, on the lengths of real conversations.

The real scheduler and KV cache run the whole sample, 64 sequences at once, over a model that does
nothing. Waste is block slots without a token's KV, over all block slots in use: the unfilled ends
of last blocks, and blocks of prompts that are still being read.

    python -m bench.waste
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.null_engine import BLOCK_SIZE, null_engine
from bench.workload import prompts
from kvota.engine.mailbox import Look, RequestState
from kvota.scheduler.budget import SchedulerLimits

LENGTHS = Path(__file__).parent / "azure_conv_2023_lengths.csv"
NUM_BLOCKS = 4096  # 131,072 tokens
SAMPLE_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True)
class Waste:
    num_requests: int
    mean_tokens: float
    share: float

    def line(self) -> str:
        return (
            f"KV waste over {self.num_requests:,} Azure conversations "
            f"(mean {self.mean_tokens:,.0f} tokens): {self.share:.2%}"
        )


def lengths(limit: int | None = None) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the sample's requests; all of them, or the first `limit`."""
    with LENGTHS.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        pairs = [(int(row["context_tokens"]), int(row["generated_tokens"])) for row in rows]
    return pairs[:limit]


def waste(limit: int | None = None) -> Waste:
    """Run the sample to its end and average over time, weighted by the slots in use."""
    requests = lengths(limit)
    null = null_engine(NUM_BLOCKS, SchedulerLimits())
    for number, (num_prompt, num_output) in enumerate(requests):
        (prompt,) = prompts(1, num_prompt, 40_000, seed=number)
        null.submit(prompt, num_output)
    seen: list[RequestState] = []

    def keep(states: Sequence[RequestState]) -> None:
        seen.extend(state for state in states if state.is_running)

    step = 0
    while null.engine.step():
        step += 1
        if step % SAMPLE_EVERY_STEPS == 0:
            null.mailbox.post(Look(keep))
    # No two of these prompts share a block, so what each holds may be added up.
    num_slots = BLOCK_SIZE * sum(state.num_blocks for state in seen)
    num_tokens = sum(state.computed_tokens for state in seen)
    mean_tokens = sum(map(sum, requests)) / len(requests)
    return Waste(len(requests), mean_tokens, 1 - num_tokens / num_slots)


if __name__ == "__main__":
    print(waste().line())

"""What a step costs beside the model: drain, plan, commit, text, publish.

python -m bench.bookkeeping
"""

from dataclasses import dataclass

from bench.null_engine import BLOCK_SIZE, null_engine
from kvota.scheduler.budget import SchedulerLimits

PROMPT_TOKENS = 64
STEPS = 200


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Median microseconds per decode step."""

    num_running: int
    num_waiting: int
    step_us: float

    def line(self) -> str:
        waiting = f" and {self.num_waiting:,} waiting" if self.num_waiting else ""
        return (
            f"bookkeeping per step with {self.num_running} running{waiting}: {self.step_us:.0f} µs"
        )


def bookkeeping(num_running: int, num_waiting: int, num_steps: int = STEPS) -> Bookkeeping:
    """Fill an engine, let all prompts be read, then measure steps in which all decode."""
    blocks_each = -(-(PROMPT_TOKENS + num_steps + 32) // BLOCK_SIZE) + 1
    limits = SchedulerLimits(
        max_running_requests=num_running, max_num_batched_tokens=max(512, num_running)
    )
    null = null_engine(num_running * blocks_each * 2, limits)
    for number in range(num_running + num_waiting):
        prompt = [number % 991, number // 991, *range(PROMPT_TOKENS - 2)]
        null.submit(prompt, num_tokens=10 * num_steps)
    while null.overheads.num_sequences[-1:] != [num_running]:
        null.engine.step()
    for _ in range(num_steps):
        null.engine.step()
    median_s = null.overheads.median_s(num_running)
    return Bookkeeping(num_running, num_waiting, median_s * 1e6)


def main() -> None:
    for num_running, num_waiting in ((64, 0), (256, 0), (64, 10_000), (256, 10_000)):
        print(bookkeeping(num_running, num_waiting).line())


if __name__ == "__main__":
    main()

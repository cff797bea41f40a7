"""Record what steps cost on this machine's real executor, and fit a step cost to them.

    python -m scripts.record_steps MODEL_FILE --seconds 60 --out steps.jsonl

The real engine runs made-up requests at changing concurrency: prompts of 8 to 600 tokens,
outputs of 4 to 96, at most 128 tokens a step. Run it while the machine has nothing else to do.
"""

import argparse
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

from kvota.core.clock import SystemClock
from kvota.core.request import Ended, EngineEvent, Request, SamplingParams
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Mailbox, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.model.load import load_model
from kvota.model.sampler import Sampler
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.calibration import fit_step_cost
from kvota.sim.node import StepCount
from kvota.telemetry.steps import RecordingExecutor, read_records

NUM_BLOCKS = 2048
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48)
CHANGE_EVERY_S = 2.0
LIMITS = SchedulerLimits(max_num_batched_tokens=128)
WARM_UP_S = 3.0


class ClosedLoop:
    """Keeps a number of requests open; as one ends, another takes its place."""

    def __init__(self, mailbox: Mailbox, rng: Random) -> None:
        self._mailbox = mailbox
        self._rng = rng
        self._numbers = count()
        self.num_open = 0

    def refill(self, wanted: int) -> None:
        while self.num_open < wanted:
            self.num_open += 1
            self._mailbox.post(Submit(self._request(f"r{next(self._numbers)}")))

    def publish(self, events: Sequence[tuple[str, EngineEvent]]) -> None:
        self.num_open -= sum(isinstance(event, Ended) for _, event in events)

    def _request(self, request_id: str) -> Request:
        length = int(8 * (600 / 8) ** self._rng.random())
        return Request(
            id=request_id,
            prompt=[self._rng.randrange(1000, 40_000) for _ in range(length)],
            max_tokens=self._rng.randint(4, 96),
            sampling=SamplingParams(temperature=0.0),
            arrived_s=0.0,
        )


def record(model: Path, threads: int, seconds: float, out: Path) -> None:
    clock, rng, mailbox = SystemClock(), Random(1), Mailbox()
    loaded = load_model(model, num_threads=threads)
    sampler = Sampler(loaded.compiled.vocab_size, num_sampled=loaded.num_sampled)
    executor = loaded.compiled.executor(NUM_BLOCKS, sampler)
    loop = ClosedLoop(mailbox, rng)
    with out.open("w") as file:
        engine = Engine(
            RecordingExecutor(executor, clock, file),
            Scheduler(KVCache(NUM_BLOCKS, executor.capacity.block_size), LIMITS),
            vocabulary=Vocabulary(()),
            clock=clock,
            mailbox=mailbox,
            publish=loop.publish,
            observer=StepCount(),
        )
        started_s = changed_s = clock.now()
        wanted, is_warm = 8, False
        while (now := clock.now()) < started_s + WARM_UP_S + seconds:
            if not is_warm and now > started_s + WARM_UP_S:
                is_warm = True
                file.truncate(file.seek(0))
            if now > changed_s + CHANGE_EVERY_S:
                changed_s, wanted = now, rng.choice(CONCURRENCIES)
            loop.refill(wanted)
            engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("steps.jsonl"))
    asked = parser.parse_args()
    record(asked.model, asked.threads, asked.seconds, asked.out)
    with asked.out.open() as file:
        found = fit_step_cost(list(read_records(file)))
    print(found.cost)
    print(f"fitted: {found.fitted.line()}")
    print(f"unseen: {found.unseen.line()}")


if __name__ == "__main__":
    main()

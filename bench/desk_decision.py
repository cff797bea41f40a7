"""What one decision of the desk costs with 256 requests running."""

import statistics
from random import Random
from time import perf_counter

from kvota.core.errors import Outcome
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Granted, Ticket

NUM_RUNNING = 256
NUM_DECISIONS = 400
DECISION_US_MAX = 200.0


def decision_us() -> float:
    """Median microseconds of `arrive` after every running lease has produced a token."""
    rng = Random(1)
    settings = DeskSettings(max_running_requests=2 * NUM_RUNNING)
    forecast = Forecast()
    group = forecast.group("", "team", "short")
    for _ in range(1_000):
        forecast.observe(group, rng.randint(1, 900))
    desk = Desk(1_000_000, settings, forecast, block_size=16)
    produced = {}
    for number in range(NUM_RUNNING):
        assert isinstance(desk.arrive(_ticket(f"r{number}", rng), 0.0), Granted)
        produced[f"r{number}"] = 0
    seconds = []
    for number in range(NUM_DECISIONS):
        now = 0.01 * (number + 1)
        for name in produced:
            produced[name] += 1
            desk.progress(name, produced[name], now)
        name = f"new{number}"
        started_s = perf_counter()
        verdict = desk.arrive(_ticket(name, rng), now)
        seconds.append(perf_counter() - started_s)
        assert isinstance(verdict, Granted)
        desk.progress(name, 1, now)
        produced[name] = 1
        _retire_longest(desk, produced, now)
    return statistics.median(seconds) * 1e6


def _retire_longest(desk: Desk, produced: dict[str, int], now: float) -> None:
    longest = max(produced, key=lambda name: produced[name])
    del produced[longest]
    desk.release(longest, Outcome.COMPLETED, now)


def _ticket(name: str, rng: Random) -> Ticket:
    return Ticket(
        id=name,
        tenant="team",
        prompt_tokens=rng.randint(50, 2_000),
        max_tokens=1_024,
        arrived_s=0.0,
    )

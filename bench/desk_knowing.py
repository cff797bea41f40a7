"""A desk that knows how long every output will be: how far knowledge of lengths alone can go.

No server has it. It admits in the same order and within the same deadlines as the others do; what
it guesses of nobody is the future: `max_tokens` of each ticket is what the output will have, so
LightLLM's formula (`policies.py`) gives the very peak of those that decode. What is left to it is
in the order of the line, in prompts that are read one after the other, and in deadlines.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import Admission, DeskSettings
from kvota.kv.cache import KVCache
from kvota.sim.desk_door import DeskDoor
from kvota.traffic.arrival import Arrival


class _Known(Forecast):
    """Everybody produces `max_tokens`, and that is knowledge, not want of it."""

    def is_known(self, group: int) -> bool:
        return True

    def observe(self, group: int, length: int, *, is_cut: bool = False) -> None:
        """There is nothing to learn."""


@dataclass(frozen=True, slots=True)
class KnowingDoors:
    """Makes doors of desks that take `max_tokens` for the length of the output."""

    settings: DeskSettings

    def __call__(self, cache: KVCache) -> DeskDoor:
        settings = replace(self.settings, admission=Admission.QUANTILE)
        capacity, block_size = cache.num_blocks * cache.block_size, cache.block_size
        return DeskDoor(Desk(capacity, settings, _Known(), block_size=block_size), cache)


def telling(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The same requests, whose clients allow exactly what they will get."""
    return [replace(one, max_tokens=one.output_tokens) for one in arrivals]

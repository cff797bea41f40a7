"""Some nodes of a fleet: they live in this process, or in another one (`crew.py`).

    slice(end_s, arriving) ─▶ [ each node works until then ] ─▶ Slice(ended, loads, has_more)

Nodes know nothing of each other, and between two slices nothing is asked of them. So where a node
lives, and with which others, changes nothing of what it says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from kvota.core.errors import Outcome
from kvota.sim.checkers import Checker
from kvota.sim.records import RequestRecord, Targets
from kvota.sim.world import DoorFactory, NodeLoad, World, WorldSettings
from kvota.traffic.arrival import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPlan:
    """What all nodes of a fleet have in common. `door` must be picklable for other processes."""

    settings: WorldSettings
    door: DoorFactory | None
    seed: int
    targets: Targets


class Arriving(NamedTuple):
    """A request on its way to a node, perhaps not for the first time."""

    replica: int
    number: int
    arrival: Arrival
    attempt: int
    first_at_s: float | None  # the first attempt; None: this is it


class EndedAt(NamedTuple):
    """What became of it at its node. Times are None where there were too few tokens."""

    number: int
    at_s: float
    outcome: Outcome
    is_good: bool
    ttft_s: float | None
    tpot_s: float | None


class Slice(NamedTuple):
    """By node, in the order of their numbers."""

    ended: Sequence[Sequence[EndedAt]]
    loads: Sequence[NodeLoad]
    has_more: bool  # of any


class Worked(NamedTuple):
    """Of one node: seconds its executor computed, and when it had nothing more to do."""

    busy_s: float
    ended_s: float


class Nodes(Protocol):
    """Nodes here or elsewhere. Every `begin` is answered by one `result`."""

    def begin(self, end_s: float, arriving: Sequence[Arriving]) -> None:
        """Work until then."""

    def result(self) -> Slice:
        """Raises AssertionError when an invariant of a node breaks."""

    def finish(self) -> Sequence[Worked]:
        """Prove that nothing is left over."""


class Shard:
    """Nodes of this process. `numbers`: which of the fleet."""

    def __init__(self, plan: NodesPlan, numbers: Sequence[int]) -> None:
        self._nodes = {number: _Node(plan, number) for number in numbers}
        self._end_s = 0.0

    def begin(self, end_s: float, arriving: Sequence[Arriving]) -> None:
        self._end_s = end_s
        for one in arriving:
            self._nodes[one.replica].expect(one)

    def result(self) -> Slice:
        nodes = self._nodes.values()
        for node in nodes:
            node.world.advance(self._end_s)
        return Slice(
            [node.endings.take() for node in nodes],
            [node.world.load for node in nodes],
            any(node.world.has_more for node in nodes),
        )

    def finish(self) -> list[Worked]:
        results = [node.world.finish() for node in self._nodes.values()]
        return [Worked(one.busy_s, one.ended_s) for one in results]


class _Node:
    def __init__(self, plan: NodesPlan, number: int) -> None:
        self.endings = _Endings(plan.targets)
        self.world = World(
            (), plan.settings, seed=plan.seed + number, door=plan.door,
            checkers=[self.endings], keeps_records=False,
        )  # fmt: skip

    def expect(self, one: Arriving) -> None:
        arrival, first_at_s = one.arrival, one.first_at_s
        if self.world.now > arrival.at_s:  # it is ahead by the end of its last step, or the slice
            first_at_s = arrival.at_s if first_at_s is None else first_at_s
            arrival = replace(arrival, at_s=self.world.now)
        record = RequestRecord(one.number, arrival, one.attempt, first_at_s)
        self.world.expect(record)


class _Endings(Checker):
    """Hears how each request of a node ended."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._heard: list[EndedAt] = []

    def take(self) -> list[EndedAt]:
        """What was heard since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def ended(self, record: RequestRecord, now: float) -> None:
        assert record.outcome is not None
        has_tpot = len(record.token_at_s) > 1
        self._heard.append(
            EndedAt(
                record.number, now, record.outcome, self._targets.is_met(record),
                record.ttft_s, record.tpot_s if has_tpot else None,
            )
        )  # fmt: skip

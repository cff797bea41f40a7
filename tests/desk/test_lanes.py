"""The line: order of bands, the floor, and who counts against its bound."""

from dataclasses import dataclass

from kvota.core.request import Band
from kvota.desk.fairness import Rank, TenantCounters
from kvota.desk.lanes import BandTurns, WaitingLine
from kvota.desk.ticket import Lane


@dataclass(eq=False)
class Waiting:
    rank: Rank
    band: Band = Band.INTERACTIVE
    lane: Lane = Lane.SHORT
    size: int = 1
    is_paused: bool = False
    is_beyond: bool = False
    tenant: str = "ann"
    weight: float = 1.0


def first(turns: BandTurns) -> Band:
    return turns.order[0]


def test_interactive_is_first_until_batch_is_owed_its_floor() -> None:
    turns = BandTurns(0.1)
    assert first(turns) is Band.INTERACTIVE
    turns.serve(Band.INTERACTIVE, 90.0, is_batch_waiting=True, was_owed=False)
    assert first(turns) is Band.BATCH
    turns.serve(Band.BATCH, 10.0, is_batch_waiting=True, was_owed=True)
    assert first(turns) is Band.INTERACTIVE


def test_batch_has_a_tenth_of_all_service_while_both_wait() -> None:
    turns = BandTurns(0.1)
    served = dict.fromkeys(Band, 0.0)
    for _ in range(1_000):
        band = first(turns)
        served[band] += 7.0
        turns.serve(band, 7.0, is_batch_waiting=True, was_owed=turns.is_owed(band))
        assert served[Band.BATCH] >= 0.1 * sum(served.values()) - 7.0
    assert abs(served[Band.BATCH] - 700) <= 7.0


def test_room_that_nobody_else_could_use_is_not_held_against_batch() -> None:
    turns = BandTurns(0.1)
    turns.serve(Band.BATCH, 1e6, is_batch_waiting=True, was_owed=turns.is_owed(Band.BATCH))
    turns.serve(Band.INTERACTIVE, 90.0, is_batch_waiting=True, was_owed=False)
    assert first(turns) is Band.BATCH


def test_what_batch_was_owed_is_forgotten_when_it_does_not_wait() -> None:
    turns = BandTurns(0.1)
    turns.serve(Band.INTERACTIVE, 90.0, is_batch_waiting=True, was_owed=False)
    turns.forget()
    assert first(turns) is Band.INTERACTIVE
    turns.serve(Band.INTERACTIVE, 90.0, is_batch_waiting=False, was_owed=False)
    assert first(turns) is Band.INTERACTIVE


def test_without_a_floor_batch_is_never_first() -> None:
    turns = BandTurns(0.0)
    turns.serve(Band.INTERACTIVE, 1e9, is_batch_waiting=True, was_owed=False)
    assert first(turns) is Band.INTERACTIVE


def test_a_paused_ticket_is_in_front_of_its_lane_and_not_bounded() -> None:
    line: WaitingLine[Waiting] = WaitingLine(TenantCounters())
    fresh = Waiting((0.0, 1), size=3)
    paused = Waiting((5.0, 2), is_paused=True, size=2)
    line.push(fresh)
    line.push(paused)
    assert line.head(Band.INTERACTIVE, Lane.SHORT) is paused
    assert line.first_fresh(Band.INTERACTIVE, Lane.SHORT) is fresh
    assert line.num_bounded == {Band.INTERACTIVE: 3, Band.BATCH: 0}
    assert (line.num_before(paused), line.num_before(fresh)) == (0, 1)
    line.check()
    line.remove(paused)
    line.remove(fresh)
    assert len(line) == line.num_choices == line.num_bounded[Band.INTERACTIVE] == 0


def test_a_position_counts_the_lane_and_the_bands_before() -> None:
    line: WaitingLine[Waiting] = WaitingLine(TenantCounters())
    batch = Waiting((0.0, 0), band=Band.BATCH)
    for entry in (
        batch,
        Waiting((0.0, 1)),
        Waiting((0.0, 2)),
        Waiting((0.0, 3), lane=Lane.LONG),
    ):
        line.push(entry)
    assert line.num_before(batch) == 2
    assert len(line) == 4

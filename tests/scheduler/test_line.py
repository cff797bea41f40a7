from hypothesis import given
from hypothesis import strategies as st

from kvota.core.request import Band
from kvota.scheduler.line import Lane, WaitingLine
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status
from tests.support.step_loop import new_request

THRESHOLD = 10


def new_sequence(
    arrival: int,
    *,
    band: Band = Band.INTERACTIVE,
    num_tokens: int = 1,
    was_preempted: bool = False,
    prompt_logprobs: int | None = None,
) -> Sequence:
    request = new_request(
        str(arrival), [0] * num_tokens, band=band, prompt_logprobs=prompt_logprobs
    )
    group = SequenceGroup(request=request, arrival=arrival, constraints=(None,))
    return Sequence(
        id=arrival,
        group=group,
        choice=0,
        tokens=list(request.prompt),
        chain=None,
        draws=(),
        status=Status.PREEMPTED if was_preempted else Status.WAITING,
    )


def served(line: WaitingLine, *, with_long: bool = True) -> list[int]:
    """Empty the line from its head."""
    order = []
    while head := line.head(with_long=with_long):
        order.append(head.id)
        line.remove(head)
    return order


def test_an_empty_line_has_no_head() -> None:
    assert WaitingLine(THRESHOLD).head(with_long=True) is None


def test_preempted_ones_come_by_band_and_then_fresh_ones_as_they_came() -> None:
    line = WaitingLine(THRESHOLD)
    line.push(new_sequence(0, band=Band.BATCH))
    line.push(new_sequence(1))
    line.push(new_sequence(2))
    line.push(new_sequence(4, was_preempted=True))
    line.push(new_sequence(3, was_preempted=True))
    line.push(new_sequence(5, band=Band.BATCH, was_preempted=True))
    assert served(line) == [3, 4, 5, 0, 1, 2]


def test_batch_that_the_desk_let_in_first_does_not_wait_for_interactive_that_came_later() -> None:
    line = WaitingLine(THRESHOLD)
    line.push(new_sequence(0, band=Band.BATCH))
    line.push(new_sequence(1))
    line.push(new_sequence(2, num_tokens=99, band=Band.BATCH))
    line.push(new_sequence(3))
    assert served(line) == [0, 1, 2, 3]


@given(st.permutations(range(6)))
def test_whoever_comes_back_has_the_place_of_its_arrival(arrivals: list[int]) -> None:
    line = WaitingLine(THRESHOLD)
    for arrival in arrivals:
        line.push(new_sequence(arrival))
    assert served(line) == sorted(arrivals)


def test_long_ones_keep_their_place_but_can_be_passed_over() -> None:
    line = WaitingLine(THRESHOLD)
    line.push(new_sequence(0, num_tokens=THRESHOLD + 1))
    line.push(new_sequence(1, num_tokens=THRESHOLD))
    line.push(new_sequence(2, prompt_logprobs=0))
    line.push(new_sequence(3))
    assert (line.num_in(Lane.LONG), line.num_in(Lane.SHORT)) == (2, 2)
    assert served(line, with_long=False) == [1, 3]
    assert served(line) == [0, 2]


entries = st.lists(st.tuples(st.sampled_from(Band), st.integers(1, 20), st.booleans()))


@given(entries, st.sets(st.integers(0, 20)))
def test_the_line_serves_in_the_order_of_a_sort(
    wanted: list[tuple[Band, int, bool]], leaving: set[int]
) -> None:
    line = WaitingLine(THRESHOLD)
    sequences = [
        new_sequence(arrival, band=band, num_tokens=num_tokens, was_preempted=was_preempted)
        for arrival, (band, num_tokens, was_preempted) in enumerate(wanted)
    ]
    for sequence in sequences:
        line.push(sequence)
    left = [sequence for sequence in sequences if sequence.id not in leaving]
    for sequence in sequences:
        if sequence.id in leaving:
            line.remove(sequence)
    assert len(line) == len(left)
    assert {sequence.id for sequence in line} == {sequence.id for sequence in left}
    again = sorted((s for s in left if s.status is Status.PREEMPTED), key=lambda s: s.rank)
    left = again + [s for s in left if s.status is Status.WAITING]
    assert served(line) == [sequence.id for sequence in left]
    assert len(line) == 0

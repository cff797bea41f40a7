from itertools import product

import pytest

from kvota.core.request import Band
from kvota.scheduler.sequence import (
    TRANSITIONS,
    IllegalTransition,
    Sequence,
    SequenceGroup,
    Status,
)
from tests.support.step_loop import new_request


def new_sequence(status: Status = Status.WAITING) -> Sequence:
    request = new_request("r", [1, 2, 3], band=Band.BATCH, n=2)
    group = SequenceGroup(request=request, arrival=7, constraints=(None, None))
    return Sequence(
        id=1, group=group, choice=1, tokens=[1, 2, 3, 4], chain=None, draws=(), status=status
    )


@pytest.mark.parametrize(("old", "new"), list(product(Status, Status)))
def test_a_transition_that_is_not_in_the_table_raises_and_changes_nothing(
    old: Status, new: Status
) -> None:
    sequence = new_sequence(old)
    if new in TRANSITIONS[old]:
        sequence.move(new)
        assert sequence.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"is {old.value} and cannot become"):
            sequence.move(new)
        assert sequence.status is old


def test_nothing_follows_the_end_and_nothing_comes_back_to_waiting() -> None:
    assert not TRANSITIONS[Status.FINISHED]
    assert not any(Status.WAITING in following for following in TRANSITIONS.values())
    assert set(TRANSITIONS) == set(Status)


def test_a_sequence_knows_its_prompt_its_output_and_its_rank() -> None:
    sequence = new_sequence()
    assert (sequence.num_prompt, sequence.num_output, sequence.output) == (3, 1, [4])
    assert sequence.num_computed == 0
    assert sequence.rank == (Band.BATCH, 7, 1)


def test_the_draws_of_two_choices_differ_in_their_index_only() -> None:
    group = new_sequence().group
    first, second = (group.new_draw(choice, [1, 2, 3]) for choice in range(2))
    assert (first.choice, second.choice) == (0, 1)
    assert first.params is second.params
    assert first.num_prompt == second.num_prompt == 3

"""Guesses cost nothing that anyone else could use, and change no token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.core.plan import Chunk
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.speculation import (
    FIXED_ROWS,
    LookupRecord,
    PromptLookup,
    PromptPlaces,
    chance_needed,
)
from tests.support.kv_executor import repeating_token
from tests.support.step_loop import StepLoop, new_request, only

ANY = 0.0  # a chance that every guess has


class AnyText:
    """A grammar that every text follows."""

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = -1

    def accept(self, token: int) -> None:
        pass

    def is_complete(self) -> bool:
        return False


def looping(**fields: int) -> StepLoop:
    """Over blocks of 32, of a model that repeats itself."""
    limits = SchedulerLimits(**({"speculative_tokens": 5} | fields))
    return StepLoop(64, 32, limits, following=repeating_token)


def speculated(loop: StepLoop) -> list[int]:
    """How many tokens each step guessed."""
    return [sum(len(chunk.speculated) for chunk in plan.chunks) for plan in loop.plans]


def lookup_of(prompt: Sequence[int]) -> PromptLookup:
    return PromptLookup(PromptPlaces(prompt))


def guessed(
    tokens: list[int], *, most: int = 5, chance_min: float = ANY, record: LookupRecord | None = None
) -> tuple[int, ...]:
    """After a prompt of all of `tokens`."""
    lookup = lookup_of(tokens)
    return lookup.guesses(tokens, record or LookupRecord(), most=most, chance_min=chance_min)


# --- what is guessed ---------------------------------------------------------------------------


def test_what_followed_the_last_two_tokens_before_is_the_guess() -> None:
    assert guessed([1, 2, 3, 4, 5, 9, 1, 2], most=3) == (3, 4, 5)


def test_of_a_prompt_the_latest_place_counts() -> None:
    assert guessed([1, 2, 3, 1, 2, 4, 1, 2], most=1) == (4,)


def test_where_the_last_guess_was_right_the_next_is_found_too() -> None:
    """1 2 was followed by 8 last, but 5 5 1 2, as here, by 7."""
    prompt = [5, 5, 1, 2, 7, 9, 1, 2, 8, 4, 5, 5]
    lookup, record = lookup_of(prompt), LookupRecord()
    assert lookup.guesses(prompt, record, most=2, chance_min=ANY) == (1, 2)
    assert lookup.guesses([*prompt, 1, 2], record, most=1, chance_min=ANY) == (7,)


def test_a_loop_goes_on_beyond_what_was_said() -> None:
    assert guessed([7, 8, 7, 8], most=5) == (7, 8, 7, 8, 7)
    assert guessed([7, 7, 7], most=4) == (7, 7, 7, 7)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_what_was_never_said_before_is_not_guessed(tokens: list[int]) -> None:
    assert guessed(tokens) == ()


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 80), st.integers(0, 8))
def test_reading_by_and_by_gives_the_same_as_reading_at_once(
    tokens: list[int], num_prompt: int, most: int
) -> None:
    num_prompt = min(num_prompt, len(tokens))
    by_and_by, at_once = lookup_of(tokens[:num_prompt]), lookup_of(tokens[:num_prompt])
    learned, wanted = LookupRecord(), LookupRecord()
    for end in range(num_prompt, len(tokens)):
        by_and_by.guesses(tokens[:end], learned, most=most, chance_min=ANY)
    guesses = at_once.guesses(tokens, wanted, most=most, chance_min=ANY)
    assert by_and_by.guesses(tokens, learned, most=most, chance_min=ANY) == guesses
    assert [learned.chance(n) for n in range(40)] == [wanted.chance(n) for n in range(40)]
    assert len(guesses) <= most


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 10))
def test_no_later_place_has_more_in_common(tokens: list[int], num_prompt: int) -> None:
    """Than the place that is looked at: all places are compared, the slow way."""
    lookup, record = lookup_of(tokens[:num_prompt]), LookupRecord()
    for end in range(max(2, num_prompt), len(tokens) + 1):
        said = tokens[:end]
        guess = lookup.guesses(said, record, most=1, chance_min=ANY)
        places = [place for place in range(2, end) if agreement(said, place) >= 2]
        assert bool(guess) == bool(places)
        if guess:
            chosen = lookup._next
            assert chosen is not None
            assert said[chosen] == guess[0]
            later = [place for place in places if place > chosen]
            assert all(agreement(said, place) <= agreement(said, chosen) for place in later)


def agreement(tokens: list[int], place: int) -> int:
    """How many tokens before `place` are those at the end."""
    pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), place)


# --- whether it pays ---------------------------------------------------------------------------


def test_a_guess_must_be_surer_the_fuller_the_batch() -> None:
    assert chance_needed(1) == 1 / (FIXED_ROWS + 1)
    assert chance_needed(FIXED_ROWS) == 0.5
    assert chance_needed(10_000) > 0.99


@given(st.integers(1, 300), st.floats(0, 1))
def test_the_chance_needed_is_where_tokens_per_row_begin_to_gain(
    running: int, chance: float
) -> None:
    rate = running / (FIXED_ROWS + running)
    with_guess = (running + chance) / (FIXED_ROWS + running + 1)
    if abs(chance - chance_needed(running)) > 1e-6:
        assert (with_guess > rate) == (chance > chance_needed(running))


def test_only_as_many_are_guessed_as_are_likely_all_right() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert guessed(tokens, most=8, chance_min=0.6) == ()
    assert guessed(tokens, most=8, chance_min=0.25) == (3, 4)
    assert guessed(tokens, most=8, chance_min=0.1) == (3, 4, 5)


def test_the_chance_is_learned_from_the_output_and_not_from_the_prompt() -> None:
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    lookup, record = lookup_of(prompt), LookupRecord()
    at_first = record.chance(2)
    lookup.guesses(prompt, record, most=1, chance_min=ANY)
    assert record.chance(2) == at_first
    lookup.guesses([*prompt, 4], record, most=1, chance_min=ANY)  # as after 1 2 before
    right = record.chance(2)
    assert right > at_first
    lookup.guesses([*prompt, 4, 7], record, most=1, chance_min=ANY)  # 1 followed 2 4 before
    assert record.chance(3) < right


def test_what_is_learned_is_of_as_many_tokens_that_agree() -> None:
    record = LookupRecord()
    before = [record.chance(agreed) for agreed in range(64)]
    for _ in range(200):
        record.learn(9, was_right=True)
        record.learn(2, was_right=False)
    after = [record.chance(agreed) for agreed in range(64)]
    assert {n for n in range(64) if after[n] > before[n]} == set(range(8, 16))
    assert {n for n in range(64) if after[n] < before[n]} == {2, 3}
    assert after[8] > 0.95
    assert after[3] < 0.05


def test_many_that_agree_are_one_class() -> None:
    record = LookupRecord()
    record.learn(5_000, was_right=True)
    assert record.chance(32) == record.chance(70_000) > record.chance(31)


def test_the_record_follows_what_changes() -> None:
    record = LookupRecord()
    for was_right in (True, False):
        for _ in range(400):
            record.learn(2, was_right=was_right)
        assert abs(record.chance(2) - was_right) < 0.01


def test_what_one_sequence_teaches_serves_the_next() -> None:
    """A first sequence that repeats itself in a full step is not guessed; a later one is."""
    record = LookupRecord()
    tokens = [1, 2, 3, 4] * 20
    chance_min = chance_needed(64)
    assert guessed(tokens, chance_min=chance_min, record=record) == ()
    lookup_of(tokens[:8]).guesses(tokens, record, most=5, chance_min=chance_min)
    assert guessed(tokens, chance_min=chance_min, record=record) == (1, 2, 3, 4, 1)


# --- in the step -------------------------------------------------------------------------------


def test_a_prompt_is_read_once_for_all_choices_of_a_request() -> None:
    loop = looping()
    (group,) = loop.finish_all(new_request("a", list(range(100)), 8, n=3))
    assert len(group.prompt_places._places or ()) == 98
    assert all(len(sequence.lookup._places) <= 8 for sequence in group.sequences)


def test_the_tokens_are_the_same_in_fewer_steps() -> None:
    plain, guessing = looping(speculative_tokens=0), looping()
    for loop in (plain, guessing):
        loop.finish_all(*(new_request(str(seed), [3, 4, seed], 60, seed=seed) for seed in range(3)))
    assert sum(speculated(plain)) == 0
    assert guessing.executor.num_speculated_right > 30
    assert len(guessing.plans) < 0.8 * len(plain.plans)


def test_a_guess_takes_no_block() -> None:
    """Not even where the next one would be the first of a new block."""
    loop = StepLoop(64, 4, SchedulerLimits(speculative_tokens=5), following=repeating_token)
    loop.add(new_request("a", [1, 1, 1], 40))
    while (plan := loop.scheduler.plan(0.0)) is not None:
        for chunk in plan.chunks:
            assert len(chunk.block_table) == -(-(chunk.start + len(chunk.token_ids)) // 4)
            assert chunk.start + len(chunk.token_ids) + len(chunk.speculated) <= 4 * len(
                chunk.block_table
            )
        loop.plans.append(plan)
        loop.settle(loop.scheduler.commit(plan, loop.executor.execute(plan)))
    assert sum(speculated(loop)) > 0


def test_nothing_is_guessed_beyond_max_tokens() -> None:
    loop = looping()
    (group,) = loop.finish_all(new_request("a", [5, 5, 5, 5], 30))
    ends = [chunk_end(chunk) for plan in loop.plans for chunk in plan.chunks]
    assert max(ends) <= 4 + 30 - 1  # the last token's KV is never needed
    assert only(group).num_output == 30


def chunk_end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids) + len(chunk.speculated)


def test_nothing_is_guessed_while_someone_waits() -> None:
    loop = looping(max_num_batched_tokens=8, max_running_requests=2)
    loop.add(new_request("first", [5, 5, 5, 5], 60))
    while not loop.plans or not speculated(loop)[-1]:
        assert loop.step() is not None
    loop.add(new_request("second", list(range(40)), 40))
    loop.add(new_request("third", [5, 5, 5], 1))
    loop.step()
    assert loop.scheduler.num_waiting
    while loop.scheduler.num_waiting:
        assert speculated(loop)[-1] == 0
        assert loop.step() is not None
    loop.run()


@pytest.mark.parametrize("room", [16, 32, 64])
def test_guesses_have_what_prompts_leave_of_a_step(room: int) -> None:
    """A prompt is read in the same steps with them and without."""
    read: dict[int, list[int]] = {}
    guessed = 0
    for most in (0, 5):
        loop = looping(max_num_batched_tokens=room, speculative_tokens=most)
        for seed in range(4):
            loop.add(new_request(str(seed), [5, 5, 5, 5], 300, seed=seed))
        for _ in range(20):
            assert loop.step() is not None
        begun = len(loop.plans)
        loop.add(new_request("long", list(range(100)), 2))
        while loop.scheduler.group("long") is not None:
            assert loop.step() is not None
        plans = loop.plans[begun:]
        reads = [c for plan in plans for c in plan.chunks if len(c.token_ids) > 1]
        read[most] = [len(chunk.token_ids) for chunk in reads]
        guessed = sum(sum(len(c.speculated) for c in plan.chunks) for plan in plans)
    assert read[0] == read[5]
    assert sum(read[0]) >= 99
    assert guessed > 0


def test_guesses_keep_to_the_budget_of_a_step() -> None:
    loop = looping(max_num_batched_tokens=4)
    loop.finish_all(*(new_request(str(seed), [5, 5], 40, seed=seed) for seed in range(3)))
    assert max(plan.num_tokens for plan in loop.plans) <= 4
    assert sum(speculated(loop)) > 0


def test_a_grammar_is_not_guessed_past() -> None:
    loop = looping()
    loop.finish_all(new_request("a", [5, 5, 5, 5], 30, new_constraint=AnyText))
    assert sum(speculated(loop)) == 0


def test_choices_guess_each_for_itself() -> None:
    loop = looping()
    loop.finish_all(new_request("a", [5, 5, 5, 5], 40, n=3))
    assert loop.executor.num_speculated_right > 10


def test_fewer_than_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_tokens must not be negative, got -1"):
        SchedulerLimits(speculative_tokens=-1)

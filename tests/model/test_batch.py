"""The arrays of a step, written out by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvota.core.plan import Chunk, Draw, StepPlan
from kvota.core.request import SamplingParams
from kvota.model.batch import Batch, Paging, batch, passes
from kvota.model.shapes import rounded_size

PAGING = Paging(block_size=4, scratch_block=99)


def draw(num_prompt: int) -> tuple[Draw, ...]:
    return (Draw(SamplingParams(), 0, (), num_prompt),)


def arrays(step: Batch) -> dict[str, object]:
    return {name: array.tolist() for name, array in step.inputs.items()}


def test_a_mixed_step() -> None:
    step = batch(
        [
            Chunk(0, [11, 12, 13], 2, (5, 6, 7)),  # five positions: two of the three blocks
            Chunk(1, [21], 8, (1, 2, 3), draws=draw(4)),  # decodes
            Chunk(2, [31, 32], 0, (9,), draws=draw(2)),  # a whole prompt
        ],
        PAGING,
    )
    assert arrays(step) == {
        "input_ids": [11, 12, 13, 21, 31, 32],
        "position_ids": [2, 3, 4, 8, 0, 1],
        "past_lens": [2, 8, 0],
        "subsequence_begins": [0, 3, 4, 6],
        "block_indices": [5, 6, 1, 2, 3, 9],
        "block_indices_begins": [0, 2, 5, 6],
        "max_context_len": 9,
        "sampled_tokens_indices": [3, 5],
    }
    assert [rows.draw for rows in step.rows] == [None, 0, 1]


def test_one_decode_alone_gets_a_row_of_company_in_the_scratch_block() -> None:
    step = batch([Chunk(0, [21], 8, (1, 2, 3), draws=draw(4))], PAGING)
    inputs = arrays(step)
    assert inputs["past_lens"] == [8, 0]
    assert inputs["subsequence_begins"] == [0, 1, 2]
    assert inputs["block_indices"] == [1, 2, 3, 99]
    assert inputs["sampled_tokens_indices"] == [0, 0]
    assert step.num_rows == 1


def test_a_large_pass_is_rounded_up_by_padding_in_the_scratch_block() -> None:
    prompt = Chunk(0, list(range(301)), 0, tuple(range(76)), draws=draw(301))
    decode = Chunk(1, [21], 8, (1, 2, 3), draws=draw(4))
    inputs = arrays(batch([prompt, decode], PAGING))
    assert inputs["subsequence_begins"] == [0, 301, 302, 304]
    assert inputs["past_lens"] == [0, 8, 0]
    assert inputs["block_indices"] == [*range(76), 1, 2, 3, 99]
    assert inputs["sampled_tokens_indices"] == [300, 301], "rows are few and stay exact"


def test_padding_longer_than_a_block_goes_around_in_the_scratch_block() -> None:
    inputs = arrays(batch([Chunk(0, list(range(257)), 0, tuple(range(65)))], PAGING))
    assert inputs["subsequence_begins"] == [0, 257, 264]
    assert inputs["block_indices"] == [*range(65), 99, 99]
    assert inputs["position_ids"] == [*range(257), *range(7)]


def test_rows_of_many_prompt_logprobs_are_rounded_up() -> None:
    wanted = Chunk(0, list(range(130)), 0, tuple(range(33)), prompt_logprobs=0, next_token=5)
    step = batch([wanted], PAGING)
    assert arrays(step)["sampled_tokens_indices"] == [*range(130), 0, 0]
    assert step.num_rows == 130
    assert step.rows[0].prompt == slice(0, 130)


@given(
    prompts=st.lists(st.integers(1, 700), max_size=4),
    num_decodes=st.integers(0, 80),
)
def test_however_the_load_mixes_passes_have_few_sizes(prompts: list[int], num_decodes: int) -> None:
    chunks = [
        Chunk(number, [1] * length, 0, tuple(range(200)), draws=draw(length))
        for number, length in enumerate(prompts)
    ]
    chunks += [
        Chunk(100 + number, [1], 8, (1, 2, 3), draws=draw(4)) for number in range(num_decodes)
    ]
    assume(chunks)
    inputs = batch(chunks, PAGING).inputs
    for name in ("input_ids", "position_ids", "sampled_tokens_indices"):
        num = len(inputs[name])
        assert num >= 2
        assert num == rounded_size(num), name


@pytest.mark.parametrize(
    ("start", "table"), [(0, [1]), (2, [1]), (3, [1, 99]), (4, [1, 2]), (7, [1, 2, 99])]
)
def test_one_prompt_token_is_followed_by_padding_that_writes_where_nobody_reads(
    start: int, table: list[int]
) -> None:
    step = batch([Chunk(0, [21], start, (1, 2)), Chunk(1, [7, 8], 0, (3,))], PAGING)
    inputs = arrays(step)
    assert inputs["subsequence_begins"] == [0, 2, 4]
    assert inputs["block_indices"] == [*table, 3]
    assert inputs["position_ids"] == [start, start + 1, 0, 1]


def test_generated_tokens_computed_again_go_one_by_one() -> None:
    step = batch([Chunk(0, [21, 22, 23], 3, (1, 2), draws=draw(3))], PAGING)
    inputs = arrays(step)
    assert inputs["past_lens"] == [3, 4, 5]
    assert inputs["subsequence_begins"] == [0, 1, 2, 3]
    assert inputs["block_indices"] == [1, 1, 2, 1, 2]
    assert inputs["sampled_tokens_indices"] == [2, 0]


def test_speculated_tokens_follow_one_by_one_with_a_row_of_logits_each() -> None:
    guessing = Chunk(0, [21], 3, (1, 2), draws=draw(3), speculated=(22, 23))
    step = batch([guessing, Chunk(1, [31], 7, (4, 5), draws=draw(3))], PAGING)
    inputs = arrays(step)
    assert inputs["input_ids"] == [21, 22, 23, 31]
    assert inputs["past_lens"] == [3, 4, 5, 7]
    assert inputs["subsequence_begins"] == [0, 1, 2, 3, 4]
    assert inputs["block_indices"] == [1, 1, 2, 1, 2, 4, 5]
    assert inputs["sampled_tokens_indices"] == [0, 1, 2, 3]
    assert [rows.draw for rows in step.rows] == [0, 3]


def test_generated_tokens_are_known_without_a_draw_too() -> None:
    middle = Chunk(0, [21, 22, 23], 3, (1, 2), num_prompt=4)
    assert lengths(StepPlan([middle]), 4) == [[(0, 1)], [(0, 2)]]
    all_generated = batch([Chunk(0, [21, 22], 3, (1, 2), num_prompt=3)], PAGING)
    assert arrays(all_generated)["subsequence_begins"] == [0, 1, 2]


def lengths(plan: StepPlan, prompt_rows_max: int) -> list[list[tuple[int, int]]]:
    """(index of the chunk, tokens of the piece) for every pass."""
    return [
        [(index, len(chunk.token_ids)) for index, chunk in one]
        for one in passes(plan, prompt_rows_max)
    ]


def test_a_plan_is_one_pass_however_many_draws_it_has() -> None:
    chunks = [Chunk(i, [1], 5, (i, i), draws=draw(2)) for i in range(9)]
    assert lengths(StepPlan(chunks), 4) == [[(i, 1) for i in range(9)]]
    assert lengths(StepPlan([]), 4) == []


def test_prompt_and_generated_tokens_of_a_chunk_take_two_passes() -> None:
    again = Chunk(0, [1, 2, 3, 4, 5], 4, (0, 1, 2), draws=draw(6))
    other = Chunk(1, [1], 5, (3, 4), draws=draw(2))
    assert lengths(StepPlan([again, other]), 4) == [[(0, 2)], [(0, 3), (1, 1)]]


def test_prompt_logprobs_are_cut_to_the_rows_of_a_pass() -> None:
    def wanted(length: int, index: int) -> Chunk:
        return Chunk(index, list(range(length)), 0, (0,), prompt_logprobs=0, next_token=50)

    plan = StepPlan([wanted(3, 0), wanted(9, 1), Chunk(2, [1, 2], 0, (0,))])
    assert lengths(plan, 4) == [[(0, 3)], [(1, 4)], [(1, 4)], [(1, 1), (2, 2)]]
    pieces: Sequence[Chunk] = [c for one in passes(plan, 4) for i, c in one if i == 1]
    assert [piece.next_token for piece in pieces] == [4, 8, 50]
    assert [piece.start for piece in pieces] == [0, 4, 8]

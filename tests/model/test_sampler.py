"""The sampler against a slow oracle, and the promises that no oracle is needed for."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvota.core.errors import InvalidRequest
from kvota.core.plan import Draw
from kvota.core.request import Constraint, SamplingParams
from kvota.model.sampler import BIASES_KEPT, Sampler
from kvota.model.sampling_math import pick, token_logprobs, top_ids
from tests.support.slow_sampler import (
    expected_distribution,
    expected_greedy,
    expected_logprobs,
    expected_scores,
)

VOCAB = 40
FLOAT32_NOISE = 2e-6  # of a cumulative probability


class Allow:
    """A grammar that allows the same tokens for ever."""

    def __init__(self, tokens: Collection[int]) -> None:
        self.tokens = tokens

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[list(self.tokens)] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        raise AssertionError("the engine advances a grammar, not the sampler")

    def is_complete(self) -> bool:
        return False


class Broken(Allow):
    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        raise RuntimeError("a bug")


class TooComplex(Allow):
    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        raise InvalidRequest("too complex")


def draw_of(
    *, tokens: Sequence[int] = (1,), num_prompt: int = 1, choice: int = 0, **params: Any
) -> Draw:
    return Draw(SamplingParams(**params), choice, tokens, num_prompt)


def sample_one(row: Sequence[float], draw: Draw, **sampler: int) -> int:
    [sampled] = Sampler(len(row), **sampler).sample(np.array([row], np.float32), [draw])
    assert sampled.error is None, sampled.error
    return sampled.token


# Steps of 1/8 are exact in float32 and leave room between unequal scores; ties are common.
scores = st.integers(-40, 40).map(lambda eighths: eighths / 8)
rows = st.lists(scores, min_size=VOCAB, max_size=VOCAB)
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def draws(draw: st.DrawFn, *, greedy: bool = False) -> Draw:
    prompt = draw(st.lists(token_ids, min_size=1, max_size=6))
    output = draw(st.lists(token_ids, max_size=8))
    quarters = st.integers(-8, 8).map(lambda n: n / 4)
    params = SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.25, 0.7, 1.0, 1.8])),
        top_k=draw(st.none() | st.integers(1, VOCAB + 5)),
        top_p=draw(st.sampled_from([0.01, 0.3, 0.6, 0.9, 0.99, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        presence_penalty=draw(quarters),
        frequency_penalty=draw(quarters),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 1.25])),
        logit_bias=draw(st.dictionaries(token_ids, quarters, max_size=4)),
        seed=draw(st.integers(-(2**63), 2**64)),
        min_tokens=draw(st.integers(0, 10)),
        stop_token_ids=draw(st.frozensets(token_ids, max_size=3)),
    )
    allowed = draw(st.none() | st.sets(token_ids, min_size=4, max_size=VOCAB))
    constraint: Constraint | None = None if allowed is None else Allow(allowed)
    return Draw(params, draw(st.integers(0, 3)), prompt + output, len(prompt), constraint)


def allowed_by(draw: Draw) -> Collection[int] | None:
    return draw.constraint.tokens if isinstance(draw.constraint, Allow) else None


@given(rows, draws(greedy=True))
def test_temperature_zero_takes_the_best_of_the_oracles_scores(
    row: list[float], draw: Draw
) -> None:
    expected = expected_scores(row, draw, allowed_by(draw))
    ordered = sorted(expected, reverse=True)
    assume(ordered[0] == ordered[1] or ordered[0] - ordered[1] > 1e-4)
    assert sample_one(row, draw) == expected_greedy(expected)


@given(rows, draws())
def test_a_draw_is_the_token_at_the_oracles_point_of_the_oracles_distribution(
    row: list[float], draw: Draw
) -> None:
    expected = expected_distribution(expected_scores(row, draw, allowed_by(draw)), draw)
    assume(expected.margin > FLOAT32_NOISE)
    token = sample_one(row, draw)
    assert token in expected.probabilities
    low, high = expected.interval(token)
    assert low - FLOAT32_NOISE <= expected.point < high + FLOAT32_NOISE


@given(rows, st.integers(0, VOCAB), token_ids)
def test_logprobs_are_of_the_unmodified_logits_ranked_with_ties_to_the_lower_id(
    row: list[float], num_top: int, bias_token: int
) -> None:
    draw = draw_of(temperature=0.0, logprobs=num_top, logit_bias={bias_token: 100.0})
    [sampled] = Sampler(VOCAB).sample(np.array([row], np.float32), [draw])
    expected = expected_logprobs(row)
    ranking = sorted(range(VOCAB), key=lambda token: (-row[token], token))
    assert sampled.token == bias_token
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(expected[bias_token], abs=1e-5)
    assert [token for token, _ in sampled.logprobs.top] == ranking[:num_top]
    for token, logprob in sampled.logprobs.top:
        assert logprob == pytest.approx(expected[token], abs=1e-5)


@given(st.lists(st.tuples(rows, draws()), min_size=2, max_size=5))
def test_a_draw_is_the_same_alone_and_in_any_batch(batch: list[tuple[list[float], Draw]]) -> None:
    sampler = Sampler(VOCAB)
    logits = np.array([row for row, _ in batch], np.float32)
    before = logits.copy()
    together = sampler.sample(logits, [draw for _, draw in batch])
    backwards = sampler.sample(logits[::-1], [draw for _, draw in reversed(batch)])
    alone = [sampler.sample(logits[i : i + 1], [draw])[0] for i, (_, draw) in enumerate(batch)]
    assert together == backwards[::-1] == alone
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 63, 64, 513, 5000, 49152])
@pytest.mark.parametrize("count", [1, 2, 20, 700])
def test_the_head_of_a_long_ranking_equals_that_of_a_full_sort(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab + count)
    for distinct in (3, 10**6):  # hardly anything but ties; hardly any tie
        row = rng.integers(0, distinct, vocab).astype(np.float32)
        ranking = np.argsort(-row, kind="stable")
        np.testing.assert_array_equal(top_ids(row, count), np.sort(ranking[:count]))


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 4.0, 30.0])
def test_top_p_over_a_long_row_draws_only_from_the_nucleus(top_p: float, sharpness: float) -> None:
    rng = np.random.default_rng(7)
    row = (rng.standard_normal(5000) * sharpness).astype(np.float32)
    draw = draw_of(top_p=top_p)
    nucleus = expected_distribution([float(score) for score in row], draw).probabilities
    ranking = np.argsort(-row, kind="stable")[: len(nucleus) + 1]
    drawn = {sample_one(row.tolist(), draw_of(top_p=top_p, seed=seed)) for seed in range(200)}
    assert drawn <= set(ranking.tolist())  # one more than exact: the border is float32's
    assert drawn & nucleus.keys()


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    row, num_draws = [math.log(p) for p in probabilities], 20_000
    for spread in ("seed", "choice", "position"):
        batch = [
            draw_of(
                seed=n if spread == "seed" else 11,
                choice=n if spread == "choice" else 0,
                tokens=range(n if spread == "position" else 5),
                num_prompt=0,
            )
            for n in range(num_draws)
        ]
        logits = np.tile(np.array(row, np.float32), (num_draws, 1))
        counts = Counter(sampled.token for sampled in Sampler(5).sample(logits, batch))
        chi_square = sum(
            (counts[token] - num_draws * p) ** 2 / (num_draws * p)
            for token, p in enumerate(probabilities)
        )
        assert chi_square < 18.5, (spread, counts)  # 99.9 % of fair samplers, 4 degrees of freedom


def test_neighbouring_positions_choices_and_seeds_are_not_correlated() -> None:
    row = [0.0] * 64
    by_position = [sample_one(row, draw_of(seed=1, tokens=range(n))) for n in range(1, 400)]
    by_choice = [sample_one(row, draw_of(seed=1, choice=n)) for n in range(1, 400)]
    by_seed = [sample_one(row, draw_of(seed=n)) for n in range(1, 400)]
    for one, other in [(by_position, by_choice), (by_choice, by_seed), (by_position, by_seed)]:
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 25  # 6 expected


def test_the_point_of_a_draw_is_fixed_for_good() -> None:
    # A change of this number makes every recorded seed say something else.
    draw = draw_of(seed=42, choice=1, tokens=range(7))
    assert sample_one([0.0] * 1000, draw) == 336


def test_ties_at_temperature_zero_go_to_the_lowest_id() -> None:
    assert sample_one([1.0, 3.0, 3.0, 3.0], draw_of(temperature=0.0)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.99e-5])
def test_a_temperature_below_a_hundred_thousandth_is_zero(temperature: float) -> None:
    row = [0.0, 1e-6, 0.0]
    assert {sample_one(row, draw_of(temperature=temperature, seed=s)) for s in range(50)} == {1}


def test_top_k_keeps_exactly_k_of_equal_scores() -> None:
    drawn = {sample_one([0.0] * 100, draw_of(top_k=3, seed=seed)) for seed in range(200)}
    assert drawn == {0, 1, 2}


def test_the_token_that_crosses_top_p_is_kept_and_the_next_is_not() -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    drawn = {sample_one(row, draw_of(top_p=0.5, seed=seed)) for seed in range(300)}
    assert drawn == {0, 1}


def test_top_p_counts_only_what_top_k_left() -> None:
    row = [math.log(p) for p in (0.3, 0.3, 0.2, 0.2)]
    # Of the two that top_k leaves, the first holds half: enough for top_p 0.45, not for 0.55.
    assert {sample_one(row, draw_of(top_k=2, top_p=0.45, seed=s)) for s in range(99)} == {0}
    assert {sample_one(row, draw_of(top_k=2, top_p=0.55, seed=s)) for s in range(99)} == {0, 1}


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    row = [math.log(p) for p in (0.6, 0.25, 0.1, 0.05)]
    assert {sample_one(row, draw_of(min_p=0.3, seed=seed)) for seed in range(300)} == {0, 1}


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    row = [1.0, 0.9]
    asked = draw_of(tokens=[0, 0, 0], num_prompt=3, temperature=0.0, frequency_penalty=1.0)
    said = draw_of(tokens=[0, 0, 0], num_prompt=2, temperature=0.0, frequency_penalty=1.0)
    assert (sample_one(row, asked), sample_one(row, said)) == (0, 1)


def test_repetition_counts_the_prompt_too() -> None:
    draw = draw_of(tokens=[0], num_prompt=1, temperature=0.0, repetition_penalty=2.0)
    assert sample_one([1.0, 0.9], draw) == 1


def test_stop_tokens_wait_for_min_tokens() -> None:
    stop: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({1})}
    answers = [sample_one([0.0, 5.0], draw_of(tokens=[0] * n, **stop)) for n in (1, 2, 3)]
    assert answers == [0, 0, 1]


def test_every_request_has_its_own_biases_however_many_there_are() -> None:
    sampler = Sampler(VOCAB)
    rows = np.zeros((3 * BIASES_KEPT, VOCAB), np.float32)
    for _ in range(2):
        batch = [
            draw_of(temperature=0.0, logit_bias={number % VOCAB: 1.0, VOCAB + 5: 9.0})
            for number in range(len(rows))
        ]
        for _ in range(2):
            found = [sampled.token for sampled in sampler.sample(rows, batch)]
            assert found == [number % VOCAB for number in range(len(rows))]


def test_padding_rows_are_never_chosen_nor_counted() -> None:
    row = [0.0, 0.0, 90.0, 90.0]
    batch = [draw_of(temperature=0.0, logprobs=4), draw_of(logprobs=4, logit_bias={3: 100.0})]
    for sampled in Sampler(4, num_sampled=2).sample(np.array([row] * 2, np.float32), batch):
        assert sampled.token < 2
        assert sampled.logprobs is not None
        assert dict(sampled.logprobs.top) == pytest.approx({0: math.log(0.5), 1: math.log(0.5)})


def test_tokens_without_a_score_change_nothing() -> None:
    draw = draw_of(
        tokens=[99, -1, 0],
        temperature=0.0,
        repetition_penalty=2.0,
        logit_bias={77: 5.0, -2: 5.0},
        min_tokens=9,
        stop_token_ids=frozenset({50}),
    )
    assert sample_one([1.0, 0.9, 0.0], draw) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_wrong_with_one_row_hurts_no_other(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, logprobs=1)
    good = Draw(params, 0, [1], 1)
    logits = np.array([[0, 1, 2], [0, np.nan, 2], [np.inf, 0, 0]] + [[0, 1, 2]] * 4, np.float32)
    batch = [good] * 3
    batch += [
        Draw(params, 0, [1], 1, grammar) for grammar in (Allow(()), Broken(()), TooComplex(()))
    ]
    batch += [good]
    first, *failed, last = Sampler(3).sample(logits, batch)
    assert first == last
    assert first.error is None
    told = [(sampled.error.status, sampled.error.message) for sampled in failed if sampled.error]
    assert [status for status, _ in told] == [502, 502, 400, 502, 400]
    for (_, message), words in zip(
        told,
        ("not a number", "not a number", "forbid the whole vocabulary", "a bug", "too complex"),
        strict=True,
    ):
        assert words in message


def test_extreme_scores_neither_warn_nor_leave_the_support() -> None:
    row = [3e38, -3e38, 0.0, 3e38]
    for temperature in (1e-5, 1.0, 1e6):
        drawn = {sample_one(row, draw_of(temperature=temperature, seed=s)) for s in range(60)}
        assert drawn == {0, 3}


def test_the_last_bit_of_the_point_still_finds_a_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvota.model.sampler.uniform", lambda *_: 1.0 - 2.0**-53)
    row = [0.0] * 3000 + [-200.0] * 3000  # the tail underflows to a weight of 0
    assert sample_one(row, draw_of()) == 2999
    monkeypatch.setattr("kvota.model.sampler.uniform", lambda *_: 0.0)
    assert sample_one(row[::-1], draw_of()) == 3000


@pytest.mark.parametrize("length", [1, 511, 512, 513, 5000])
def test_a_pick_from_a_long_row_is_the_index_whose_share_holds_the_point(length: int) -> None:
    rng = np.random.default_rng(length)
    weights = rng.random(length, np.float32) * (rng.random(length) < 0.5)
    weights[rng.integers(length)] = 1.0
    edges = [0.0, *np.cumsum(weights.astype(np.float64)).tolist()]
    for point in [0.0, 1.0 - 2.0**-53, *rng.random(300).tolist()]:
        index = pick(weights, point)
        assert weights[index] > 0
        low, high = edges[index] / edges[-1], edges[index + 1] / edges[-1]
        assert low - 1e-12 <= point < high + 1e-12


def test_a_point_that_rounding_moves_to_the_end_picks_the_last_possible_index() -> None:
    assert pick(np.array([1, 2, 0, 0], np.float32), 1.0) == 1


def test_a_token_among_the_first_has_one_probability_there_and_by_itself() -> None:
    row = np.random.default_rng(3).normal(0, 5, 1000).astype(np.float32)
    best = int(row.argmax())
    entry = token_logprobs(row, best, 3)
    assert entry.top[0] == (best, entry.logprob)


def test_prompt_logprobs_are_of_the_tokens_that_followed() -> None:
    row = [0.5, 1.5, -1.0]
    expected = expected_logprobs(row)
    first, second = Sampler(3).prompt_logprobs(np.array([row, row], np.float32), [2, 0], 1)
    assert (first.token, second.token) == (2, 0)
    assert first.logprob == pytest.approx(expected[2], abs=1e-6)
    assert second.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [token for token, _ in first.top] == [1]


@given(
    st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(0, 3),
)
def test_a_prompt_token_has_its_true_rank_below_the_top_too(
    row: list[float], token: int, num_top: int
) -> None:
    """Ties rank by id, as in the list of the top."""
    assume(token < len(row) and max(row) > -math.inf)
    padded = np.array([[*row, 99.0]], np.float32)  # a padding row of the head has no rank
    [entry] = Sampler(len(row) + 1, num_sampled=len(row)).prompt_logprobs(padded, [token], num_top)
    ranking = sorted(range(len(row)), key=lambda other: (-row[other], other))
    assert entry.rank == 1 + ranking.index(token)


def test_a_row_that_is_not_finite_has_no_prompt_logprobs() -> None:
    [entry] = Sampler(2).prompt_logprobs(np.array([[np.nan, 0.0]], np.float32), [1], 2)
    assert math.isnan(entry.logprob)
    assert entry.top == ()
    assert entry.rank is None


def test_a_grammar_over_many_words_masks_exactly_its_tokens() -> None:
    allowed = {0, 31, 32, 63, 64, 65, 99}
    grammar = Allow(allowed)
    logits = np.zeros((300, 100), np.float32)
    batch = [Draw(SamplingParams(seed=seed), 0, [1], 1, grammar) for seed in range(300)]
    assert {sampled.token for sampled in Sampler(100).sample(logits, batch)} == allowed


@pytest.mark.parametrize("num_sampled", [0, 6])
def test_an_impossible_number_of_sampled_ids_is_refused(num_sampled: int) -> None:
    with pytest.raises(ValueError, match="num_sampled"):
        Sampler(5, num_sampled=num_sampled)

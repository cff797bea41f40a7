from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.evaluate.divergence import Position, divergence, has_same_top

Distribution = list[float]
SIZE = 6
WEIGHTS = st.lists(st.floats(0.001, 1), min_size=SIZE, max_size=SIZE)


def normal(weights: Distribution) -> Distribution:
    return [one / sum(weights) for one in weights]


def told(distribution: Distribution, top: int, followed: int) -> Position:
    """What a server says: the likeliest tokens, and the one that followed."""
    likeliest = sorted(range(SIZE), key=lambda token: -distribution[token])[:top]
    return Position(followed, {one: log(distribution[one]) for one in {*likeliest, followed}})


def exact(p: Distribution, q: Distribution) -> float:
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True))


@given(WEIGHTS, WEIGHTS, st.integers(0, SIZE - 1))
def test_it_is_exact_when_the_whole_vocabulary_is_told(
    left: Distribution, right: Distribution, followed: int
) -> None:
    p, q = normal(left), normal(right)
    found = divergence(told(p, SIZE, followed), told(q, SIZE, followed))
    assert found.nats == pytest.approx(exact(p, q), abs=1e-5)
    assert found.covered == pytest.approx(1)


@given(WEIGHTS, WEIGHTS, st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(1, SIZE))
def test_it_is_never_above_the_true_one(
    left: Distribution, right: Distribution, followed: int, top: int, other_top: int
) -> None:
    p, q = normal(left), normal(right)
    found = divergence(told(p, top, followed), told(q, other_top, followed))
    assert 0 <= found.nats <= exact(p, q) + 1e-5


@given(WEIGHTS, WEIGHTS, st.integers(0, SIZE - 1), st.integers(1, SIZE - 1))
def test_more_told_tokens_never_lower_it(
    left: Distribution, right: Distribution, followed: int, top: int
) -> None:
    p, q = normal(left), normal(right)
    few, more = (
        divergence(told(p, num, followed), told(q, num, followed)) for num in (top, top + 1)
    )
    assert more.nats >= few.nats - 1e-5


def test_a_known_case() -> None:
    p = Position("a", {"a": log(0.5), "b": log(0.3)})
    q = Position("a", {"a": log(0.25), "c": log(0.5)})
    found = divergence(p, q)
    assert found.nats == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))
    assert found.covered == pytest.approx(0.5)


def test_a_probability_of_zero_on_one_side_is_finite() -> None:
    p = Position("a", {"a": log(0.5), "b": log(0.5)})
    q = Position("a", {"a": 0.0, "b": -9999.0})
    assert 10 < divergence(p, q).nats < 100
    assert divergence(q, p).nats == pytest.approx(log(2), abs=1e-5)


def test_the_same_top_token_is_found_by_probability() -> None:
    p = Position("b", {"a": log(0.6), "b": log(0.4)})
    assert has_same_top(p, Position("b", {"a": log(0.5), "b": log(0.5)}))
    assert not has_same_top(p, Position("b", {"a": log(0.4), "b": log(0.6)}))
    assert not has_same_top(p, Position("b", {"b": log(0.9)}))
    assert exp(p.logprob) == pytest.approx(0.4)

"""Chains that end, and thresholds that only count when nobody has room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.fallback import (
    CHAIN_MAX,
    FallbackTable,
    Threshold,
    is_over_threshold,
    why_fall_back,
)
from kvota.gateway.policy.routing import Replica

models = st.sampled_from("abcdef")


def test_a_chain_begins_with_the_model_and_follows_the_fallbacks() -> None:
    table = FallbackTable({"large": "medium", "medium": "small", "small": None})
    assert table.chain("large") == ("large", "medium", "small")
    assert table.chain("small") == ("small",)


@pytest.mark.parametrize(
    ("fallbacks", "loop"),
    [
        ({"a": "b", "b": "a"}, "a → b → a"),
        ({"c": "c"}, "c → c"),
        ({"x": "a", "a": "b", "b": "c", "c": "a"}, "a → b → c → a"),
    ],
)
def test_a_loop_is_refused_and_spelled_out(fallbacks: dict[str, str | None], loop: str) -> None:
    with pytest.raises(ConfigError, match=f"loop: {loop}\\.$"):
        FallbackTable(fallbacks)


def test_a_fallback_that_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'smal'"):
        FallbackTable({"large": "smal", "small": None})


def test_a_chain_without_end_in_sight_is_refused() -> None:
    names = [f"m{number}" for number in range(CHAIN_MAX + 1)]
    fallbacks: dict[str, str | None] = dict(zip(names, [*names[1:], None], strict=True))
    with pytest.raises(ConfigError, match="more than"):
        FallbackTable(fallbacks)
    del fallbacks["m0"]
    assert len(FallbackTable(fallbacks).chain("m1")) == CHAIN_MAX


@settings(deadline=None)
@given(st.dictionaries(models, st.none() | models, max_size=6))
def test_whatever_is_accepted_ends_without_repeating_a_model(
    fallbacks: dict[str, str | None],
) -> None:
    try:
        table = FallbackTable(fallbacks)
    except ConfigError:
        return
    for model in fallbacks:
        chain = table.chain(model)
        assert chain[0] == model
        assert len(set(chain)) == len(chain)
        assert fallbacks[chain[-1]] is None


FULL = Replica(id="full", kv_usage=0.97)
QUEUED = Replica(id="queued", waiting=12)
IDLE = Replica(id="idle")
THRESHOLD = Threshold(kv_usage=0.95, waiting=10)


@pytest.mark.parametrize(
    ("replica", "is_over"),
    [
        (FULL, True),
        (QUEUED, True),
        (IDLE, False),
        (Replica(id="just", kv_usage=0.95), True),
        (Replica(id="almost", kv_usage=0.949, waiting=9), False),
    ],
)
def test_either_figure_can_put_a_replica_over(replica: Replica, is_over: bool) -> None:
    assert is_over_threshold(replica, THRESHOLD) == is_over


def test_no_threshold_is_never_reached() -> None:
    assert why_fall_back([Replica(id="a", kv_usage=1.0, waiting=999)], Threshold()) is None


def test_one_replica_with_room_keeps_the_model() -> None:
    assert why_fall_back([FULL, QUEUED], THRESHOLD) is not None
    assert why_fall_back([FULL, QUEUED, IDLE], THRESHOLD) is None


def test_a_replica_that_may_not_serve_has_no_room() -> None:
    broken = Replica(id="broken", is_healthy=False)
    assert why_fall_back([FULL, broken], THRESHOLD) == "kv_usage at 95% or more"
    assert why_fall_back([broken], THRESHOLD) is None


@pytest.mark.parametrize("setting", [{"kv_usage": 1.2}, {"kv_usage": 0.0}, {"waiting": 0}])
def test_senseless_thresholds_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Threshold(**setting)  # type: ignore[arg-type]

"""Versions side by side: sticky keys, live weights, promotion and rollback."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.rollout import Rollout, Version, choose
from kvota.gateway.policy.watch import WatchSettings

KEYS = [f"key-{number}" for number in range(3_000)]
SETTINGS = WatchSettings()


def version(name: str, weight: float) -> Version:
    return Version(name=name, model=f"chat-{name}", weight=weight)


def new_rollout(*versions: Version) -> Rollout:
    return Rollout("chat", versions or (version("v1", 90), version("v2", 10)), settings=SETTINGS)


def choices(versions: Sequence[Version]) -> dict[str, str]:
    return {key: choose(versions, key).name for key in KEYS}


def weights(rollout: Rollout) -> dict[str, float]:
    return {one.name: one.weight for one in rollout.versions}


def test_a_key_keeps_its_version_while_weights_stay() -> None:
    rollout = new_rollout()
    assert choices(rollout.versions) == choices(new_rollout().versions)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 100), min_size=2, max_size=4),
    st.integers(0, 3),
    st.floats(0, 100),
)
def test_a_changed_weight_moves_keys_only_to_or_from_that_version(
    before: list[float], place: int, weight: float
) -> None:
    rollout = new_rollout(*(version(f"v{number}", one) for number, one in enumerate(before)))
    changed = f"v{place % len(before)}"
    old = {key: rollout.choose(key).name for key in KEYS[:60]}
    grows = weight > weights(rollout)[changed]
    rollout.set_weights({changed: weight})
    for key, was in old.items():
        if (now := rollout.choose(key).name) != was:
            assert (now if grows else was) == changed


def test_raising_a_version_moves_the_necessary_share_and_no_more() -> None:
    rollout = new_rollout(version("v1", 80), version("v2", 10), version("v3", 10))
    before = choices(rollout.versions)
    rollout.set_weights({"v2": 35})  # of 125 now: from 10 % to 28 %
    after = choices(rollout.versions)
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {"v2"}
    assert len(moved) / len(KEYS) == pytest.approx(0.18, abs=0.03)


def test_weight_zero_gets_nothing() -> None:
    assert set(choices([version("v1", 1), version("v2", 0)]).values()) == {"v1"}


def test_a_bad_version_is_taken_out_at_once_and_says_why() -> None:
    rollout = new_rollout()
    for _ in range(500):
        rollout.observe("v1", True, 0.2, 0.0)
    verdicts = [rollout.observe("v2", False, None, 0.0) for _ in range(30)]
    assert sum(one.rolls_back for one in verdicts) == 1
    assert weights(rollout) == {"v1": 90, "v2": 0}
    assert "failed in 10 of 10 calls" in rollout.rolled_back["v2"]
    assert set(choices(rollout.versions).values()) == {"v1"}


def test_a_rolled_back_version_stays_out_until_an_operator_gives_it_a_weight() -> None:
    rollout = new_rollout()
    rollout.roll_back("v2", "by hand")
    for _ in range(100):
        rollout.observe("v2", True, 0.1, 0.0)
    assert weights(rollout)["v2"] == 0
    rollout.set_weights({"v2": 5})
    assert rollout.rolled_back == {}
    assert "v2" in choices(rollout.versions).values()


def test_a_rollback_moves_only_the_keys_of_that_version() -> None:
    rollout = new_rollout(version("v1", 70), version("v2", 20), version("v3", 10))
    before = choices(rollout.versions)
    rollout.roll_back("v2", "by hand")
    after = choices(rollout.versions)
    assert {before[key] for key in KEYS if before[key] != after[key]} == {"v2"}


def test_when_nothing_is_left_the_stable_version_takes_over() -> None:
    rollout = new_rollout(version("v1", 0), version("v2", 10))
    rollout.roll_back("v2", "by hand")
    assert weights(rollout) == {"v1": 1, "v2": 0}


def test_the_stable_version_cannot_be_rolled_back() -> None:
    with pytest.raises(ConfigError, match="'v1' is the stable version"):
        new_rollout().roll_back("v1", "by hand")


def test_a_promoted_version_gets_everything_and_becomes_what_others_are_compared_with() -> None:
    rollout = new_rollout()
    rollout.promote("v2")
    assert rollout.stable == "v2"
    assert weights(rollout) == {"v1": 0, "v2": 1}
    rollout.set_weights({"v1": 0.5})
    for _ in range(500):
        rollout.observe("v2", True, 0.2, 0.0)
    assert any(rollout.observe("v1", False, None, 0.0).rolls_back for _ in range(30))


def test_a_report_for_a_version_that_is_gone_is_nothing() -> None:
    assert not new_rollout().observe("v0", False, None, 0.0).rolls_back


@pytest.mark.parametrize(
    "changes",
    [
        {"v2": -1.0},
        {"v1": 0.0, "v2": 0.0},
        {"v9": 1.0},
        {"v2": 5.0, "v9": 1.0},
        {"v1": float("nan")},
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(changes: dict[str, float]) -> None:
    rollout = new_rollout()
    with pytest.raises(ConfigError, match="chat"):
        rollout.set_weights(changes)
    assert weights(rollout) == {"v1": 90, "v2": 10}


@pytest.mark.parametrize(
    "versions",
    [(), (version("v1", 1), version("v1", 2)), (version("v1", 0),), (version("v1", -1),)],
)
def test_versions_that_make_no_sense_are_refused(versions: tuple[Version, ...]) -> None:
    with pytest.raises(ConfigError, match="chat"):
        Rollout("chat", versions, settings=SETTINGS)


def test_an_unknown_stable_version_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'v7'"):
        Rollout("chat", (version("v1", 1),), stable="v7", settings=SETTINGS)


def test_a_new_process_resumes_where_another_left_off() -> None:
    before = new_rollout(version("v1", 90), version("v2", 10), version("v3", 5))
    before.roll_back("v3", "too slow")
    before.promote("v2")
    before.set_weights({"v1": 0.25})
    after = new_rollout(version("v1", 90), version("v2", 10), version("v3", 5))
    after.resume(before.state)
    assert after.state == before.state
    assert after.stable == "v2"
    assert after.rolled_back == {"v3": "too slow"}
    assert choices(after.versions) == choices(before.versions)
    after.set_weights({"v3": 1})
    assert before.rolled_back, "a state is a copy"


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": {"v1": 1.0}},
        {"weights": {"v1": 1.0, "v2": 0.0, "v9": 1.0}},
        {"weights": {"v1": 0.0, "v2": 0.0}},
        {"weights": {"v1": -1.0, "v2": 1.0}},
        {"stable": "v9"},
    ],
)
def test_the_state_of_something_else_is_refused_and_changes_nothing(
    changes: dict[str, Any],
) -> None:
    rollout = new_rollout()
    before = rollout.state
    with pytest.raises(ConfigError, match="chat"):
        rollout.resume(replace(before, **changes))
    assert rollout.state == before

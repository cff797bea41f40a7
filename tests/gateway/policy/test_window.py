"""The ring of slices against a list of everything that ever happened."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.gateway.policy.window import Counts, OutcomeWindow

SLICE_S = 0.5
NUM_SLICES = 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.booleans())))
def test_the_window_counts_what_the_last_slices_hold(steps: list[tuple[float, bool]]) -> None:
    window = OutcomeWindow(SLICE_S * NUM_SLICES, NUM_SLICES)
    happened: list[tuple[int, bool]] = []
    now = 100.0
    for passed_s, ok in steps:
        now += passed_s
        window.add(ok, now)
        newest = int(now // SLICE_S)
        happened.append((newest, ok))
        held = [one for at, one in happened if at > newest - NUM_SLICES]
        assert window.counts(now) == Counts(held.count(True), held.count(False))


def test_a_silent_window_empties_itself() -> None:
    window = OutcomeWindow(2.0, 4)
    window.add(False, 0.0)
    assert window.counts(1.9).num == 1
    assert window.counts(2.0).num == 0
    assert window.counts(1e9).num == 0


def test_no_calls_is_no_failure_rate() -> None:
    assert OutcomeWindow(1.0).counts(0.0).failure_rate == 0.0


def test_a_cleared_window_forgets_at_once() -> None:
    window = OutcomeWindow(10.0)
    window.add(True, 1.0)
    window.clear()
    window.add(False, 1.0)
    assert window.counts(1.0) == Counts(0, 1)

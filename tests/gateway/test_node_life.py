import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.node_life import (
    BACKOFF_MAX_S,
    Bounds,
    IllegalMove,
    NodeLife,
    Order,
    Probe,
    Reason,
    State,
)

BOUNDS = Bounds(stuck_patience_s=5, silent_patience_s=20, resident_bytes_max=1000)


def up(now: float = 0.0, *, load_s: float = 3.0, bounds: Bounds = BOUNDS) -> NodeLife:
    life = NodeLife(bounds, now)
    life.started(now)
    life.ready(now + load_s)
    return life


def test_it_starts_at_once_and_is_up_when_it_says_so() -> None:
    life = NodeLife(BOUNDS, 10.0)
    assert life.order(10.0) is Order.START
    life.started(10.0)
    assert (life.state, life.order(11.0)) == (State.STARTING, None)
    life.ready(14.0)
    assert life.is_up
    assert life.load_s == 4.0
    assert life.order(14.0) is None


def test_the_first_death_is_answered_at_once_and_later_ones_ever_later() -> None:
    life, now, waits = up(0.0, load_s=0.0), 1.0, []
    for _ in range(10):
        life.exited(now)
        died = now
        while life.order(now) is None:
            now += 0.25
        waits.append(now - died)
        life.started(now)
    assert waits[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == BACKOFF_MAX_S


def test_a_long_good_life_forgives_earlier_failures() -> None:
    life = up(0.0, load_s=0.0)
    for now in (1.0, 2.0, 4.0):
        life.exited(now)
        life.started(now + 10)
        life.ready(now + 10)
    life.exited(4.0 + 10 + BOUNDS.stable_after_s)
    assert life.order(44.0) is Order.START


@pytest.mark.parametrize(
    ("probe", "patience_s", "reason"),
    [(Probe.STUCK, 5.0, Reason.STUCK), (Probe.SILENT, 20.0, Reason.SILENT)],
)
def test_a_process_that_does_not_serve_is_killed_after_a_while(
    probe: Probe, patience_s: float, reason: Reason
) -> None:
    life = up(0.0)
    life.probed(probe, 100.0)
    life.probed(probe, 100.0 + patience_s - 0.1)
    assert life.order(100.0 + patience_s - 0.1) is None
    assert life.order(100.0 + patience_s) is Order.KILL
    assert life.why is reason


def test_one_good_look_forgives_the_bad_ones() -> None:
    life = up(0.0)
    life.probed(Probe.STUCK, 100.0)
    life.probed(Probe.FINE, 104.0)
    life.probed(Probe.STUCK, 106.0)
    assert life.order(110.0) is None


def test_too_fat_a_process_drains_then_is_killed_and_starts_again_at_once() -> None:
    life = up(0.0)
    life.weighed(1000)
    assert life.order(50.0) is None
    life.weighed(1001)
    assert life.order(50.0) is Order.TERMINATE
    life.terminated(50.0)
    assert life.order(86.9) is None
    assert life.order(87.0) is Order.KILL
    life.exited(87.0)
    assert life.why is Reason.TOO_FAT
    assert life.order(87.0) is Order.START


def test_only_restarts_have_a_time_limit() -> None:
    life = NodeLife(Bounds(start_timeout_s=60), 0.0)
    life.started(0.0)
    assert life.order(1000.0) is None
    life.exited(1000.0)
    life.started(1000.0)
    assert life.order(1060.1) is Order.KILL
    assert life.why is Reason.TOO_SLOW


def test_clients_are_told_the_time_that_the_last_start_took() -> None:
    life = up(0.0, load_s=8.0)
    life.exited(100.0)
    assert life.retry_after_s(100.0) == 8.0
    life.started(100.0)
    assert life.retry_after_s(103.0) == 5.0
    assert life.retry_after_s(200.0) == 1.0, "late, and due any moment"
    life.exited(200.0)
    assert life.retry_after_s(200.0) == 8.5, "its back-off comes on top"


@pytest.mark.parametrize("state", [State.DOWN, State.STARTING, State.UP, State.ENDING])
def test_stopping_ends_in_stopped_from_everywhere(state: State) -> None:
    life = NodeLife(BOUNDS, 0.0)
    if state is not State.DOWN:
        life.started(0.0)
    if state in (State.UP, State.ENDING):
        life.ready(1.0)
    if state is State.ENDING:
        life.terminated(2.0)
    order = life.stop(3.0)
    if order is Order.TERMINATE:
        life.terminated(3.0)
    if life.state is not State.STOPPED:
        life.exited(4.0)
    assert life.state is State.STOPPED
    assert life.order(1e9) is None


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    life = NodeLife(BOUNDS, 0.0)
    with pytest.raises(IllegalMove):
        life.ready(1.0)
    assert life.state is State.DOWN


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 40)), max_size=60))
def test_whatever_happens_an_order_can_always_be_followed(story: list[tuple[int, float]]) -> None:
    """Obeying every order, among any events that can occur, never makes an illegal move."""
    life, now = NodeLife(BOUNDS, 0.0), 0.0
    for event, pause_s in story:
        now += pause_s
        order = life.order(now)
        if order is Order.START:
            life.started(now)
        elif order is Order.TERMINATE:
            life.terminated(now)
        elif order is Order.KILL:
            life.exited(now)
        has_process = life.state in (State.STARTING, State.UP, State.ENDING)
        if event == 0 and life.state is State.STARTING:
            life.ready(now)
        elif event == 1 and has_process:
            life.exited(now)
        elif event == 2:
            life.probed(Probe.SILENT, now)
        elif event == 3:
            life.probed(Probe.FINE, now)
        elif event == 4:
            life.weighed(10**6)
        assert life.retry_after_s(now) >= 0

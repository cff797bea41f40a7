"""The breaker's table, its clocks and its generations."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerSettings,
    Event,
    Permit,
    State,
)
from tests.gateway.policy.breaker_model import BreakerModel, Call

SETTINGS = BreakerSettings(
    window_s=10.0,
    failure_rate_max=0.5,
    num_calls_min=4,
    failures_in_row_max=3,
    open_s=2.0,
    open_growth=2.0,
    open_max_s=10.0,
    jitter=0.0,
    probes_max=2,
    probes_to_close=3,
    probe_timeout_s=5.0,
)


def new_breaker(settings: BreakerSettings = SETTINGS, seed: int = 0) -> Breaker:
    return Breaker(settings, Random(seed))


def call(breaker: Breaker, ok: bool, now: float) -> None:
    permit = breaker.may_pass(now)
    assert permit is not None
    breaker.report(permit, ok, now)


def tripped(now: float = 0.0) -> Breaker:
    breaker = new_breaker()
    for _ in range(SETTINGS.failures_in_row_max):
        call(breaker, False, now)
    assert breaker.state(now) is State.OPEN
    return breaker


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ok", "fail", "fail", "withdraw", "again", "hold", "well", "begin"]
        ),
        st.sampled_from([0.0, 0.0, 0.1, 0.9, 2.0, 5.0, 11.0]),
        st.integers(0, 30),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(steps)
@example([("hold", 0.0, 1), ("ask", 0.9, 0), ("well", 5.0, 0)])  # a silent probe, then it is well
def test_the_breaker_does_what_the_slow_model_does(
    steps: list[tuple[str, float, int]],
) -> None:
    breaker, model = new_breaker(), BreakerModel(SETTINGS)
    given_out: list[tuple[Permit, Call]] = []
    now = 0.0
    for step, passed_s, number in steps:
        now += passed_s
        if step == "ask":
            permit, expected = breaker.may_pass(now), model.ask(now)
            assert (permit is None) == (expected is None)
            if permit is not None and expected is not None:
                given_out.append((permit, expected))
        elif step == "hold":
            breaker.hold(now + number / 5, now)
            model.hold(now + number / 5, now)
        elif step == "well":
            breaker.recovered(now)
            model.recovered(now)
        elif given_out:
            permit, expected = given_out[number % len(given_out)]
            if step == "begin":
                breaker.begun(permit, now)
                model.begin(expected, now)
            elif step == "withdraw":
                breaker.withdraw(permit, now)
            else:
                breaker.report(permit, step == "ok", now)
            if step != "begin":
                model.report(expected, None if step == "withdraw" else step == "ok", now)
        model.keep_time(now)
        snapshot = breaker.snapshot(now)
        breaker.check()
        assert (snapshot.state, snapshot.generation) == (model.state, model.changes)
        assert snapshot.num_probes == len(model.probes())
        left_s = model.until_s - now if model.state is State.OPEN else 0.0
        assert snapshot.retry_after_s == pytest.approx(left_s)


def test_the_table_is_what_the_page_says() -> None:
    reached = {
        (state, event): TRANSITIONS.get((state, event)) for state in State for event in Event
    }
    assert {pair for pair, state in reached.items() if state is None} == {
        (State.CLOSED, Event.ELAPSE),
        (State.CLOSED, Event.PROVE),
        (State.OPEN, Event.TRIP),
        (State.OPEN, Event.HOLD),
        (State.OPEN, Event.PROVE),
        (State.HALF_OPEN, Event.ELAPSE),
    }


def test_few_calls_do_not_open_it_whatever_their_rate() -> None:
    breaker = new_breaker()
    for ok in (False, True, False):
        call(breaker, ok, 0.0)
    assert breaker.state(0.0) is State.CLOSED
    call(breaker, False, 0.0)
    assert breaker.state(0.0) is State.OPEN


def test_failures_in_a_row_open_it_even_when_calls_are_rare() -> None:
    breaker = new_breaker()
    for minute in range(3):
        call(breaker, False, 60.0 * minute)
    assert breaker.state(120.0) is State.OPEN


def test_an_old_burst_of_failures_is_forgotten() -> None:
    breaker = new_breaker()
    call(breaker, False, 0.0)
    call(breaker, False, 0.0)
    for second in range(20, 30):
        call(breaker, second % 3 != 0, float(second))
    assert breaker.state(30.0) is State.CLOSED


def test_no_request_passes_while_it_is_open() -> None:
    breaker = tripped()
    assert all(breaker.may_pass(tenth / 10) is None for tenth in range(20))
    assert breaker.may_pass(2.0) is not None


def test_only_so_many_probes_are_out_at_once() -> None:
    breaker = tripped()
    first, second = breaker.may_pass(2.0), breaker.may_pass(2.0)
    assert first is not None
    assert second is not None
    assert breaker.may_pass(2.0) is None
    breaker.report(first, True, 2.1)
    assert breaker.may_pass(2.1) is not None


def test_a_withdrawn_probe_gives_its_place_back_and_proves_nothing() -> None:
    breaker = tripped()
    for _ in range(20):
        permit = breaker.may_pass(2.0)
        assert permit is not None
        breaker.withdraw(permit, 2.0)
    assert breaker.state(2.0) is State.HALF_OPEN


def test_a_probe_has_proved_it_as_soon_as_its_answer_begins() -> None:
    breaker = tripped()
    for _ in range(SETTINGS.probes_to_close):
        permit = breaker.may_pass(2.0)
        assert permit is not None
        breaker.begun(permit, 2.0)
        breaker.begun(permit, 2.0)
    assert breaker.state(100.0) is State.CLOSED, "though none has ended"


def test_a_probe_that_begins_and_then_fails_opens_it_again() -> None:
    breaker = tripped()
    good, bad = breaker.may_pass(2.0), breaker.may_pass(2.0)
    assert good is not None
    assert bad is not None
    for permit in (good, bad):
        breaker.begun(permit, 2.0)
    breaker.report(good, True, 3.0)
    assert breaker.state(3.0) is State.HALF_OPEN, "two of three; an end does not count again"
    breaker.report(bad, False, 3.0)
    assert breaker.state(3.0) is State.OPEN


def test_probes_that_never_report_do_not_block_it_forever() -> None:
    breaker = tripped()
    breaker.may_pass(2.0)
    breaker.may_pass(2.0)
    assert breaker.state(6.9) is State.HALF_OPEN
    assert breaker.state(7.0) is State.OPEN
    assert breaker.may_pass(7.0 + 4.0) is not None


def test_a_late_failure_does_not_open_what_has_proved_itself() -> None:
    breaker = new_breaker()
    late = [breaker.may_pass(0.0) for _ in range(10)]
    for _ in range(3):
        call(breaker, False, 0.0)
    for _ in range(3):
        call(breaker, True, 2.0)
    assert breaker.state(2.0) is State.CLOSED
    for permit in late:
        assert permit is not None
        breaker.report(permit, False, 3.0)
    assert breaker.state(3.0) is State.CLOSED
    assert breaker.snapshot(3.0).counts.num == 0


def test_a_late_success_does_not_close_what_has_failed() -> None:
    breaker = new_breaker()
    late = [breaker.may_pass(0.0) for _ in range(10)]
    for _ in range(3):
        call(breaker, False, 0.0)
    assert breaker.state(2.0) is State.HALF_OPEN
    for permit in late:
        assert permit is not None
        breaker.report(permit, True, 2.0)
    assert breaker.state(2.0) is State.HALF_OPEN


def test_one_permit_counts_once() -> None:
    breaker = new_breaker()
    permit = breaker.may_pass(0.0)
    assert permit is not None
    for _ in range(10):
        breaker.report(permit, False, 0.0)
    assert breaker.snapshot(0.0).counts.num == 1


def test_a_backend_that_only_works_for_its_probes_is_left_alone_longer_and_longer() -> None:
    breaker, now, times_s = tripped(), 0.0, []
    for _ in range(5):
        open_s = breaker.retry_after_s(now)
        times_s.append(open_s)
        now += open_s
        for _ in range(3):
            call(breaker, True, now)
        for _ in range(3):
            call(breaker, False, now)
    assert times_s == pytest.approx([2.0, 4.0, 8.0, 10.0, 10.0])


def test_a_good_time_makes_the_next_open_time_short_again() -> None:
    breaker = tripped()
    call(breaker, False, 2.0)
    for _ in range(3):
        call(breaker, True, 6.0)
    for _ in range(3):
        call(breaker, False, 6.0 + SETTINGS.window_s)
    assert breaker.retry_after_s(16.0) == pytest.approx(2.0)


def test_of_two_holds_the_later_end_counts() -> None:
    breaker = new_breaker()
    breaker.hold(20.0, now=0.0)
    breaker.hold(1.0, now=0.0)
    assert breaker.may_pass(19.9) is None
    assert breaker.retry_after_s(0.0) == 20.0
    assert breaker.may_pass(20.0) is not None


def test_many_breakers_that_opened_together_do_not_try_again_together() -> None:
    settings = BreakerSettings(jitter=0.2)
    ends = []
    for seed in range(200):
        breaker = new_breaker(settings, seed)
        for _ in range(settings.failures_in_row_max):
            call(breaker, False, 0.0)
        ends.append(breaker.retry_after_s(0.0))
    assert all(4.0 <= end <= 6.0 for end in ends)
    assert len({round(end, 1) for end in ends}) > 15


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_calls_min", 0),
        ("probes_max", 0),
        ("window_s", 0.0),
        ("failure_rate_max", 1.5),
        ("jitter", 1.0),
        ("open_max_s", 1.0),
    ],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        BreakerSettings(**{field: value})  # type: ignore[arg-type]


def test_a_backend_that_is_well_again_is_tried_at_once_however_long_it_was_to_be_left_alone() -> (
    None
):
    breaker = tripped(0.0)
    breaker.recovered(0.5)
    assert breaker.state(0.5) is State.HALF_OPEN
    assert breaker.retry_after_s(0.5) == 0.0
    call(breaker, False, 0.5)
    assert breaker.retry_after_s(0.5) == 2 * SETTINGS.open_s, "it has not proved itself yet"


def test_what_a_backend_has_asked_for_stands_also_when_it_is_well_again() -> None:
    breaker = tripped(0.0)
    breaker.hold(1.5, 0.0)
    breaker.recovered(0.5)
    assert breaker.retry_after_s(0.5) == pytest.approx(1.0)
    assert breaker.state(1.5) is State.HALF_OPEN


def test_looking_well_changes_nothing_while_it_is_closed() -> None:
    breaker = new_breaker()
    breaker.recovered(1.0)
    assert (breaker.state(1.0), breaker.generation) == (State.CLOSED, 0)


def test_trips_in_a_row_are_counted_while_it_is_open_until_it_is_good_or_asks_for_peace() -> None:
    breaker = tripped()
    assert breaker.num_trips_in_row(1.0) == 1
    assert breaker.num_trips_in_row(2.5) == 0, "half-open: it may be asked"
    call(breaker, False, 2.5)
    assert breaker.num_trips_in_row(2.5) == 2
    for _ in range(SETTINGS.probes_to_close):
        call(breaker, True, 7.0)
    for _ in range(SETTINGS.failures_in_row_max):
        call(breaker, False, 7.0)
    assert breaker.num_trips_in_row(7.0) == 1
    breaker.hold(18.0, 15.0, is_fault=True)
    assert breaker.num_trips_in_row(15.0) == 2, "who is set up wrongly fails"
    breaker.hold(50.0, 20.0)
    assert breaker.state(20.0) is State.OPEN
    assert breaker.num_trips_in_row(20.0) == 0

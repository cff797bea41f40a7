import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import Limit, RateLimited
from kvota.gateway.abuse import AbuseSettings, AbuseWatch, Blocked, Suspicion

SETTINGS = AbuseSettings(
    key_failures_max=10,
    address_failures_max=5,
    window_s=60,
    block_s=30,
    block_max_s=200,
    forgive_after_s=1000,
    suspects_max=50,
)


def blocked_for(
    watch: AbuseWatch, now: float, address: str | None = None, key_id: str | None = None
) -> float:
    """Seconds until the suspect is let in again; 0: it is."""
    try:
        watch.check(now, address=address, key_id=key_id)
    except RateLimited as error:
        return error.retry_after_s if error.limit is Limit.ABUSE else math.nan
    return 0.0


def fail_until_blocked(watch: AbuseWatch, now: float, address: str) -> float:
    for _ in range(SETTINGS.address_failures_max):
        watch.failed(now, address=address)
    return blocked_for(watch, now, address)


def test_a_burst_of_failures_blocks_an_address_and_only_that() -> None:
    told: list[Blocked] = []
    watch = AbuseWatch(SETTINGS, told.append)
    for _ in range(4):
        watch.failed(100.0, address="1.2.3.4")
        assert blocked_for(watch, 100.0, "1.2.3.4") == 0
    watch.failed(100.0, address="1.2.3.4")
    assert blocked_for(watch, 100.0, "1.2.3.4") == 30
    assert blocked_for(watch, 129.9, "1.2.3.4") == pytest.approx(0.1)
    assert blocked_for(watch, 130.0, "1.2.3.4") == 0
    assert blocked_for(watch, 100.0, "1.2.3.5") == 0
    assert told == [
        Blocked(suspicion=Suspicion.ADDRESS, suspect="1.2.3.4", block_s=30, num_blocks=1)
    ]


def test_a_good_key_that_fails_is_blocked_itself_and_its_address_is_spared() -> None:
    watch = AbuseWatch(SETTINGS)
    for _ in range(10):
        watch.failed(1.0, address="1.2.3.4", key_id="kv-1")
    assert blocked_for(watch, 1.0, "9.9.9.9", "kv-1") == 30
    assert blocked_for(watch, 1.0, "1.2.3.4", "kv-2") == 0
    assert blocked_for(watch, 1.0, "1.2.3.4") == 0


def test_a_slow_trickle_of_failures_is_never_blocked() -> None:
    watch = AbuseWatch(SETTINGS)
    for number in range(1000):
        watch.failed(number * 12.1, address="1.2.3.4")  # five per 60.5 s
        assert blocked_for(watch, number * 12.1, "1.2.3.4") == 0


def test_each_block_in_a_row_is_longer_up_to_a_bound() -> None:
    watch, now, blocks = AbuseWatch(SETTINGS), 0.0, []
    for _ in range(6):
        blocks.append(fail_until_blocked(watch, now, "a"))
        now += blocks[-1]
    assert blocks == [30, 60, 120, 200, 200, 200]


def test_after_a_quiet_time_blocks_are_short_again() -> None:
    watch = AbuseWatch(SETTINGS)
    assert fail_until_blocked(watch, 0.0, "a") == 30
    assert fail_until_blocked(watch, 30.0, "a") == 60
    assert fail_until_blocked(watch, 90.0 + 1000, "a") == 120  # not quite quiet for long enough
    assert fail_until_blocked(watch, 1210.0 + 1000.1, "a") == 30


def test_knocking_at_a_shut_door_does_not_lengthen_the_block() -> None:
    watch = AbuseWatch(SETTINGS)
    fail_until_blocked(watch, 0.0, "a")
    for number in range(100):
        watch.failed(number / 10, address="a")
    assert blocked_for(watch, 10.0, "a") == 20
    assert blocked_for(watch, 30.0, "a") == 0


def test_memory_is_bounded_and_a_knocking_suspect_is_not_forgotten() -> None:
    watch = AbuseWatch(SETTINGS)
    fail_until_blocked(watch, 0.0, "persistent")
    for number in range(10_000):
        watch.failed(1.0, address=f"10.0.{number // 256}.{number % 256}")
        if number % 20 == 0:
            assert blocked_for(watch, 1.0, "persistent") == 29
    assert watch.num_suspects == 50


def test_an_ipv6_network_is_one_suspect_and_mapped_addresses_are_ipv4() -> None:
    watch = AbuseWatch(SETTINGS)
    for number in range(5):
        watch.failed(0.0, address=f"2001:db8:1:2:{number:x}::1%eth0")
        watch.failed(0.0, address=f"::ffff:10.0.0.{number}")
        watch.failed(0.0, address="::ffff:10.0.0.9")
    assert blocked_for(watch, 0.0, "2001:db8:1:2:ffff::9") == 30
    assert blocked_for(watch, 0.0, "2001:db8:1:3::1") == 0
    assert blocked_for(watch, 0.0, "10.0.0.9") == 30
    assert blocked_for(watch, 0.0, "10.0.0.1") == 0


def test_callers_without_an_address_and_odd_addresses_are_taken_as_they_are() -> None:
    watch = AbuseWatch(SETTINGS)
    for _ in range(9):
        watch.failed(0.0, address=None)
        watch.failed(0.0, address="a:b")
    assert blocked_for(watch, 0.0) == 0
    assert blocked_for(watch, 0.0, "a:b") == 30


def test_it_can_be_switched_off() -> None:
    watch = AbuseWatch(AbuseSettings(is_on=False, address_failures_max=1))
    watch.failed(0.0, address="a")
    assert blocked_for(watch, 0.0, "a") == 0


@given(st.lists(st.floats(0, 30, allow_nan=False), max_size=60))
def test_a_block_comes_only_where_a_window_holds_too_many_failures(gaps: list[float]) -> None:
    """A leaky bucket is full only if some stretch of time had at least a bucket's worth in it."""
    blocks: list[Blocked] = []
    watch, now, times = AbuseWatch(SETTINGS, blocks.append), 0.0, list[float]()
    for gap in gaps:
        now += gap
        times.append(now)
        watch.failed(now, address="a")
        if blocks:
            break
    worst = max(
        (len([t for t in times if start <= t]) - (now - start) * 5 / 60 for start in times),
        default=-math.inf,
    )
    assert worst > 5 - 1e-6 if blocks else worst < 5 + 1e-6

import pytest

from kvota.core.clock import ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5


def test_a_manual_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match="only moves forward"):
        ManualClock().advance(-0.1)


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)

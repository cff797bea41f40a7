"""Each row says met or missed as its figures are, and its lines fit its header."""

from collections import Counter

import pytest

from bench import desk_live_isolation as isolation
from bench import desk_live_overload as overload
from bench import desk_live_refusals as refusals
from bench.desk_live_bench import Finding
from bench.desk_live_isolation import Phase
from bench.desk_live_judge import Fate, Verdict
from bench.desk_live_load import Seen
from bench.desk_live_refusals import Flood


def missed(found: "list[Finding]") -> list[str]:
    return [one.text for one in found if not one.is_met]


def num_columns(line: str) -> int:
    return line.splitlines()[0].count("|")


def verdict(goodput_rps: float, *, refusal_s: float = 0.01, lag_s: float = 0.0) -> Verdict:
    return Verdict(
        rate_rps=2.0,
        num_asks=10,
        goodput_rps=goodput_rps,
        attainment=0.9,
        long_attainment=0.8,
        fates=Counter({Fate.GOOD: 8, Fate.REFUSED: 2}),
        codes=Counter(queue_full=2),
        refusal_p50_s=0.001,
        refusal_p99_s=refusal_s,
        lag_p99_s=lag_s,
        lag_max_s=lag_s,
    )


def test_the_plateau_is_kept_from_nine_tenths_of_the_knees_goodput() -> None:
    held = [verdict(1.0), verdict(2.0), verdict(1.8), verdict(1.8)]
    assert missed(list(overload.findings(held))) == []
    fallen = [*held[:3], verdict(1.79)]
    assert len(missed(list(overload.findings(fallen)))) == 1


def test_slow_refusals_hanging_clients_and_a_late_generator_are_missed_targets() -> None:
    bad = verdict(2.0, refusal_s=0.05, lag_s=0.1)
    bad.fates[Fate.HANGING] = bad.fates[Fate.FAILED] = 1
    assert len(missed(list(overload.findings([verdict(1.0), verdict(2.0), bad, bad])))) == 4


def test_a_run_fits_the_table_of_overload() -> None:
    line = overload.line(verdict(1.8), verdict(2.0))
    assert num_columns(line) == num_columns(overload.HEADER)
    assert "| 0.90 | 90% | 80% | 0 | 2 (queue_full 2) |" in line


def short(ttft_s: float, num: int = 10, *, lag_s: float = 0.0) -> list[Seen]:
    return [Seen(lag_s, 2.0, ttft_s, 2.0, 200, is_whole=True, num_tokens=5)] * num


def test_isolation_is_kept_up_to_one_and_a_half_and_twice() -> None:
    alone = Phase("nothing", short=short(0.2))
    one = Phase("one", short=short(0.29), long_s=[15.0, 20.0, 40.0])
    five = Phase("five", is_together=True, short=short(0.29), long_s=[30.0, 100.0])
    assert missed(list(isolation.findings(10.0, alone, one, five))) == []
    one.short, five.long_s = short(0.31), [30.0, 101.0]
    assert len(missed(list(isolation.findings(10.0, alone, one, five)))) == 2


def test_long_ones_that_never_end_or_fail_are_missed_targets() -> None:
    alone, one, five = (Phase(name, short=short(0.2)) for name in "abc")
    one.num_long_failed = 1
    assert len(missed(list(isolation.findings(10.0, alone, one, five)))) == 3
    assert num_columns(one.line()) == num_columns(isolation.HEADER)
    one.long_s.append(3.0)
    assert num_columns(one.line()) == num_columns(isolation.HEADER)


def flood(*, each_bytes: float, code: str = "queue_full", after_s: float = 0.004) -> Flood:
    seen = [Seen(0.001, after_s, status=503, code=code)] * 100
    return Flood(seen, [(at_s, 6e8 + each_bytes * 150.0 * at_s) for at_s in range(60)], 150.0)


@pytest.mark.parametrize(
    ("found", "num_missed"),
    [
        (flood(each_bytes=0), 0),
        (flood(each_bytes=199), 0),
        (flood(each_bytes=1_000), 1),
        (flood(each_bytes=0, after_s=0.06), 1),
        (flood(each_bytes=0, code="internal_error"), 1),
    ],
)
def test_refusals_are_fast_and_leave_nothing(found: Flood, num_missed: int) -> None:
    assert len(missed(list(refusals.findings(found)))) == num_missed
    assert num_columns(found.line()) == num_columns(refusals.HEADER)


def test_growth_is_told_in_bytes_of_one_refusal() -> None:
    assert flood(each_bytes=700).bytes_per_refusal == pytest.approx(700)

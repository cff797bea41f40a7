"""Each row says met or missed as its figures are, and its lines fit its header."""

from collections import Counter

import pytest

from bench import desk_live_isolation_figures as isolation
from bench import desk_live_overload as overload
from bench import desk_live_refusals as refusals
from bench.desk_live_bench import Finding
from bench.desk_live_isolation import ShortOnes
from bench.desk_live_isolation_figures import Phase, Repeat
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


def phase(name: str, *repeats: Repeat, num_together: int = 1) -> Phase:
    return Phase(name, num_together, list(repeats))


def test_isolation_is_kept_up_to_one_and_a_half_and_twice() -> None:
    alone = phase("nothing", Repeat(short(0.2)), Repeat(short(0.2)))
    one = phase("one", Repeat(short(0.29), [15.0, 40.0]), Repeat(short(0.29), [20.0]))
    five = phase(
        "five", Repeat(short(0.2), [30.0, 100.0]), Repeat(short(0.3), [99.0]), num_together=5
    )
    assert missed(list(isolation.findings(10.0, alone, one, five))) == []
    one.repeats[1].short = short(0.31)
    five.repeats[1].long_s = [30.0, 101.0]
    found = missed(list(isolation.findings(10.0, alone, one, five)))
    assert len(found) == 2
    assert "1.55 × without (at most 1.5; repeats 1.45, 1.55; p95 1.55 ×, median 1.55 ×)" in found[0]
    assert "all of them take 2.01 × 5 lone times (at most 2; 2.00, 2.02)" in found[1]


def test_the_p99_is_of_all_repeats_together() -> None:
    """One slow one of 200 is beyond it; of its own repeat it is the p99."""
    alone = phase("nothing", Repeat(short(0.2, 100)), Repeat(short(0.2, 100)))
    one = phase("one", Repeat(short(0.2, 100)), Repeat([*short(0.2, 99), *short(0.6, 1)]))
    assert one.ttft_ratio(0.99, alone) == pytest.approx(1.0)
    assert one.p99_ratios(alone) == pytest.approx([1.0, 3.0])
    assert "| 200 | 0 | 200 | 200 | 200 | 200, 600 |" in one.line()


def test_long_ones_that_never_end_or_fail_are_missed_targets() -> None:
    alone, one, five = (phase(name, Repeat(short(0.2))) for name in "abc")
    one.num_long_failed = 1
    assert len(missed(list(isolation.findings(10.0, alone, one, five)))) == 3
    assert num_columns(one.line()) == num_columns(isolation.HEADER)
    one.repeats[0].long_s.append(3.0)
    assert num_columns(one.line()) == num_columns(isolation.HEADER)


def test_beside_long_ones_the_same_short_requests_come() -> None:
    wanted = ShortOnes(rate_rps=2.0, stretch_s=10.0, number=1)
    alone, longer = wanted.asks(), wanted.asks(num_stretches=3)
    assert len(alone) == 20
    assert longer[:20] == alone
    assert len(longer) == 60
    assert [one.due_s for one in longer] == sorted(one.due_s for one in longer)
    assert ShortOnes(2.0, 10.0, number=2).asks() != alone


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

import pytest

from bench.desk_live_metrics import parsed, slope

PAGE = """# TYPE kvota_requests_total counter
kvota_requests_total{model="m",outcome="completed"} 3.0
kvota_requests_total{model="m",outcome="refused"} 4.0
kvota_requests_total{model="unknown",outcome="refused"} 1.0
kvota_requests_total{model="m",outcome="invalid"} 0.0
# TYPE kvota_kv_blocks gauge
kvota_kv_blocks{state="used"} 7.0
kvota_kv_blocks{state="free"} 9.0
"""


def test_samples_are_summed_over_the_labels_that_were_not_asked_for() -> None:
    page = parsed(PAGE)
    assert page.total("kvota_requests_total") == 8
    assert page.total("kvota_requests_total", outcome="refused") == 5
    assert page.total("kvota_kv_blocks", state="used") == 7
    assert page.by("kvota_requests_total", "outcome") == {"completed": 3, "refused": 5}


def test_a_metric_that_is_not_there_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(KeyError, match="kvota_gone"):
        parsed(PAGE).total("kvota_gone")


def test_the_slope_of_a_line_is_its_own_and_of_a_breath_is_none() -> None:
    assert slope([(x, 5 + 3 * x) for x in (0.0, 1.0, 4.0)]) == pytest.approx(3)
    assert slope([(x, float(x % 2)) for x in range(101)]) == pytest.approx(0, abs=0.001)
    assert slope([(1.0, 2.0)]) == 0.0

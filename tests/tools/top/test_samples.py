import pytest

from kvota.tools.top.samples import Samples

PAGE = """\
# HELP kvota_rejected_total Requests refused with 503.
# TYPE kvota_rejected_total counter
kvota_rejected_total{reason="queue_full",lane="short"} 2.0
kvota_rejected_total{reason="queue_full",lane="long"} 3.0
kvota_rejected_total{reason="queue_timeout",lane="short"} 1.0
vllm:num_requests_running{model_name="a b"} 4.0
"""


def test_a_total_is_over_all_labels_and_absent_is_not_zero() -> None:
    samples = Samples.parse(PAGE)
    assert samples.total("kvota_rejected_total") == 6
    assert samples.total("kvota_nothing") is None


def test_a_label_that_was_added_does_not_split_what_is_summed_by_another() -> None:
    sums = Samples.parse(PAGE).by("kvota_rejected_total", "reason")
    assert sums == {"queue_full": 5, "queue_timeout": 1}


def test_a_labels_value_is_found() -> None:
    samples = Samples.parse(PAGE)
    assert samples.label("vllm:num_requests_running", "model_name") == "a b"
    assert samples.label("kvota_nothing", "model_name") is None


def test_what_is_no_prometheus_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        Samples.parse("<html>\nnothing here</html>\n")

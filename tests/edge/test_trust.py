import pytest

from kvota.core.errors import InvalidRequest
from kvota.edge.trust import Course, UsageReport, read_usage, tenant_of, told, weight_of


@pytest.mark.parametrize("tenant", ["team-a", "Büro", "研究", "a b"])
def test_what_a_gateway_tells_is_what_a_node_hears(tenant: str) -> None:
    headers = dict(told(tenant, 0.1))
    assert tenant_of(headers) == tenant
    assert weight_of(headers) == 0.1


def test_without_headers_nobody_is_known() -> None:
    assert tenant_of({}) == "anonymous"
    assert weight_of({}) is None


@pytest.mark.parametrize("weight", [b"nan", b"0", b"-1", b"inf", b"heavy"])
def test_what_is_no_weight_is_refused(weight: bytes) -> None:
    with pytest.raises(InvalidRequest):
        weight_of({b"x-kvota-weight": weight})


@pytest.mark.parametrize(
    "course",
    [
        None,
        Course(lane="long", band="batch"),
        Course(
            lane="short", band="interactive", num_preemptions=2, kv_block_s=1.25, queued_s=0.0,
            first_token_s=0.1234, time_per_output_token_s=12.0,
        ),
    ],
)  # fmt: skip
def test_a_report_survives_the_way(course: Course | None) -> None:
    report = UsageReport(12, 3, 45, course)
    assert read_usage(report.encode()) == report
    assert read_usage(report.comment().removeprefix(b": usage ")) == report
    assert read_usage(b"position=3") is None

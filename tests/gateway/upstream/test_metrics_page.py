"""Numbers from a Prometheus page, whatever else stands on it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvota.gateway.upstream.metrics_page import Sample, read_samples, total


def read(page: str, name: str = "a") -> list[Sample]:
    return list(read_samples(page.encode(), [name])[name])


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("a 1", 1.0),
        ("a 1.5e3", 1500.0),
        ("a{} 2", 2.0),
        ('a{x="1"} 3', 3.0),
        ('a{x="1",} 3', 3.0),
        ('a{x="1", y="}"} 4', 4.0),
        ("a 5 1700000000000", 5.0),
        ('a{x="1"}\t6\r', 6.0),
        ("a -7", -7.0),
    ],
)
def test_lines_that_count(line: str, value: float) -> None:
    assert [sample.value for sample in read(line)] == [value]


@pytest.mark.parametrize(
    "line",
    ["", "# a 1", "ab 1", "a", "a x", "a NaN", "a +Inf", 'a{x="1 2', "a{x=1} 2", "a{", 'a{x="1"}',
     "a_total 1", " a 1"],
)  # fmt: skip
def test_lines_that_do_not(line: str) -> None:
    assert read(f"{line}\na 9\n")[-1] == Sample({}, 9.0)
    assert len(read(f"{line}\na 9\n")) == 1


def test_labels_are_unescaped() -> None:
    assert read(r'a{x="q\"\\n\n",y="日"} 1') == [Sample({"x": 'q"\\n\n', "y": "日"}, 1.0)]


label = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.tuples(label, label, st.floats(allow_nan=False, allow_infinity=False)),
                max_size=6, unique_by=lambda one: one[:2]))  # fmt: skip
def test_whatever_the_reference_client_writes_is_read(
    rows: list[tuple[str, str, float]],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("ns:a", "with \n help", ["x", "y"], registry=registry)
    for x, y, value in rows:
        gauge.labels(x, y).set(value)
    samples = read_samples(generate_latest(registry), ["ns:a"])["ns:a"]
    found = {(one.labels["x"], one.labels["y"]): one.value for one in samples}
    assert found == {(x, y): value for x, y, value in rows}


@given(st.binary(max_size=300))
def test_no_page_raises(page: bytes) -> None:
    for sample in read_samples(b"a" + page, ["a"])["a"]:
        assert math.isfinite(sample.value)


def test_totals_take_the_first_name_that_is_there() -> None:
    samples = read_samples(b'b{e="0"} 1\nb{e="1"} 2\nc 9', ["a", "b", "c"])
    assert total(samples, "a", "b", "c") == 3.0
    assert total(samples, "a") is None


def test_a_huge_line_is_passed_over() -> None:
    assert read('a{x="' + "y" * 10**6 + '"} 1\na 2') == [Sample({}, 2.0)]

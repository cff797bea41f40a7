"""Charts are well-formed SVG that shows every value it was given, and nothing from elsewhere."""

from math import inf, nan
from xml.etree import ElementTree

import pytest

from kvota.tools.report.charts import (
    Bars,
    Mark,
    Series,
    bar_chart,
    line_chart,
    number,
    tick_texts,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"
    return ElementTree.fromstring(svg)


def texts(chart: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in chart.iter(f"{SVG}text")]


def test_a_line_has_a_point_for_each_value() -> None:
    chart = parsed(line_chart([Series("p50", [(1, 10), (2, 20), (4, 15)])], "rate", "ms"))
    circles = list(chart.iter(f"{SVG}circle"))
    assert len(circles) == 3
    assert [circle[0].text for circle in circles] == ["p50: 1, 10", "p50: 2, 20", "p50: 4, 15"]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert heights[0] > heights[2] > heights[1], "larger values stand higher"


@pytest.mark.parametrize("unbounded", [inf, nan])
def test_what_is_not_finite_leaves_a_gap(unbounded: float) -> None:
    series = Series("p99", [(1, 10), (2, unbounded), (3, 30), (4, 40)])
    chart = parsed(line_chart([series], "rate", "ms"))
    path = next(chart.iter(f"{SVG}path")).attrib["d"]
    assert path.count("M") == 2
    assert len(list(chart.iter(f"{SVG}circle"))) == 3


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    chart = parsed(line_chart([Series("a", [(0, 1), (1, 1), (10, 2)])], "x", "y", log_x=True))
    assert len(list(chart.iter(f"{SVG}circle"))) == 2


def test_marks_carry_their_label_and_are_within_the_picture() -> None:
    marks = [Mark("knee", 50), Mark("SLO", 900, is_level=True)]
    chart = parsed(line_chart([Series("a", [(1, 1)])], "x", "y", marks=marks))
    assert {"knee", "SLO"} <= set(texts(chart))
    for line in chart.iter(f"{SVG}line"):
        assert 0 <= float(line.attrib["x1"]) <= 760
        assert 0 <= float(line.attrib["y1"]) <= 340


def test_names_are_escaped() -> None:
    series = [Series("<a & b>", [(1, 1)]), Series("c", [(1, 2)])]
    chart = parsed(line_chart(series, "x < y", "&"))
    assert {"<a & b>", "c", "x < y", "&"} <= set(texts(chart))


def test_only_several_lines_need_a_legend() -> None:
    one = parsed(line_chart([Series("alone", [(1, 1)])], "x", "y"))
    assert "alone" not in texts(one)


def test_no_points_at_all_make_an_empty_chart() -> None:
    chart = parsed(line_chart([Series("a", [])], "x", "y"))
    assert not list(chart.iter(f"{SVG}path"))


def test_bars_are_as_high_as_their_values() -> None:
    chart = parsed(bar_chart(["a", "b"], [Bars("now", [1, 2]), Bars("then", [2, 4])], "s"))
    heights = [float(bar.attrib["height"]) for bar in chart.iter(f"{SVG}rect")]
    assert heights == pytest.approx([heights[0] * k for k in (1, 2, 2, 4)], rel=0.01)


def test_stacked_bars_stand_on_each_other() -> None:
    bars = [Bars("queue", [1]), Bars("prefill", [3])]
    chart = parsed(bar_chart(["a"], bars, "s", is_stacked=True))
    lower, upper = chart.iter(f"{SVG}rect")
    assert float(upper.attrib["y"]) + float(upper.attrib["height"]) == pytest.approx(
        float(lower.attrib["y"]), abs=0.2
    )
    assert lower.attrib["x"] == upper.attrib["x"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1.0, "1"),
        (12.345, "12.3"),
        (1234567, "1,234,567"),
        (0.00001, "1.0e-05"),
        (inf, "unbounded"),
        (-3.5, "-3.5"),
        (100, "100"),
        (10, "10"),
    ],
)
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0, 200.0, 400.0], ["0", "200", "400"]),
        ([0.0, 0.002, 0.004], ["0", "0.002", "0.004"]),
        ([564.0, 564.05, 564.1], ["564.00", "564.05", "564.10"]),
        ([563.5, 564.0, 564.5], ["563.5", "564.0", "564.5"]),
        ([10_000.2, 10_000.4], ["10,000.2", "10,000.4"]),
    ],
)
def test_ticks_of_an_axis_are_told_apart(values: list[float], shown: list[str]) -> None:
    assert tick_texts(values) == shown


def test_a_series_far_from_zero_has_no_two_ticks_with_one_text() -> None:
    points = [(minute, 564.03 + 0.01 * minute) for minute in range(9)]
    chart = parsed(line_chart([Series("MiB", points)], "minutes", "MiB", from_zero=False))
    shown = texts(chart)
    assert len(set(shown) - {"minutes", "MiB"}) >= len(shown) - 4, "an x and a y may be equal"
    assert "564.04" in shown

"""Charts as SVG text: no scripts, no fonts or files from elsewhere, readable in light and dark.

A value that is not finite (an unbounded percentile) leaves a gap in its line. Hovering over a
point shows its numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import floor, isfinite, log10

from kvota.tools.report.scales import Scale, linear, logarithmic

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 72, 20, 14, 46
LEGEND_ROW, LETTER = 18, 6.9  # pixels: a row of the legend, a letter at 12 px
NUM_CIRCLES_MAX = 40  # of a line; more would hide it
NUM_POINTS_MAX = 200  # of a line that answer to the mouse
MARK_ROWS = 3  # labels of neighbouring marks stand below each other
# Okabe and Ito's colours, which people who are colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#777777")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name in the legend and its points (x, y), in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled line across the chart: upright at an x, or level at a y (a limit, say)."""

    label: str
    at: float
    is_level: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One value for each label of a bar chart, under one name and colour."""

    name: str
    values: Sequence[float]


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = True,
    marks: Sequence[Mark] = (),
) -> str:
    """Lines over a common x axis. Logarithmic axes leave out values of 0 and below.

    `from_zero=False`: the y axis begins near the lowest value, where only change matters.
    """
    legend = _Legend([(one.name, one.is_dashed) for one in series])
    upright = [mark.at for mark in marks if not mark.is_level]
    level = [mark.at for mark in marks if mark.is_level]
    shown = [_finite(one.points, log_x=log_x, log_y=log_y) for one in series]
    x_values = [x for one in shown for x, _ in one] + upright
    y_values = [y for one in shown for _, y in one] + level
    x = _scale(x_values, LEFT, WIDTH - RIGHT, is_log=log_x)
    y = _scale(y_values, HEIGHT - BOTTOM, legend.height, is_log=log_y, from_zero=from_zero)
    parts = [*_y_axis(y, y_label), *_x_axis(x, y, x_label), *_marks(marks, x, y)]
    for number, (one, points) in enumerate(zip(series, shown, strict=True)):
        parts.extend(_line(one, set(points), x, y, _colour(number)))
    return _svg(f"{y_label} over {x_label}", [*parts, *legend.parts()])


def bar_chart(
    labels: Sequence[str], bars: Sequence[Bars], y_label: str, *, is_stacked: bool = False
) -> str:
    """A group of bars (or one stack) for each label. Every Bars has a value for each label."""
    assert all(len(one.values) == len(labels) for one in bars), "a value for each label"
    legend = _Legend([(one.name, False) for one in bars])
    values = [value if isfinite(value) else 0.0 for one in bars for value in one.values]
    if is_stacked:
        values = [sum(one.values[at] for one in bars) for at in range(len(labels))]
    y = linear(values, HEIGHT - BOTTOM, legend.height)
    parts = list(_y_axis(y, y_label))
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    for at, label in enumerate(labels):
        left = LEFT + at * slot
        parts.append(_text(left + slot / 2, HEIGHT - BOTTOM + 18, _cut(label, slot), "middle"))
        parts.extend(_group(label, at, bars, left, slot, y, is_stacked=is_stacked))
    return _svg(y_label, [*parts, *legend.parts()])


def number(value: float) -> str:
    """A figure as people write it: three significant digits, thousands set apart."""
    if not isfinite(value):
        return "unbounded"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}" if abs(value) >= 0.0001 else f"{value:.1e}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def tick_texts(values: Sequence[float]) -> list[str]:
    """Of the values at one axis, ascending: with as many digits as tell each from the next."""
    texts = [number(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    step = min(high - low for low, high in pairwise(values))
    decimals = max(0, -floor(log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


class _Legend:
    """Names with their colours above the chart, in as many rows as they need; none for one name."""

    def __init__(self, names: Sequence[tuple[str, bool]]) -> None:
        self._places: list[tuple[float, float, str, bool]] = []
        left, row = float(LEFT), 0
        for name, is_dashed in names if len(names) > 1 else ():
            width = 34 + LETTER * len(name)
            if left + width > WIDTH - RIGHT and left > LEFT:
                left, row = float(LEFT), row + 1
            self._places.append((left, TOP + row * LEGEND_ROW, name, is_dashed))
            left += width + 8
        self.height = TOP + (row + 1) * LEGEND_ROW if self._places else TOP + 4

    def parts(self) -> Iterator[str]:
        for at, (left, top, name, is_dashed) in enumerate(self._places):
            yield (
                f'<line x1="{left:.0f}" y1="{top:.0f}" x2="{left + 20:.0f}" y2="{top:.0f}" '
                f'stroke="{_colour(at)}" stroke-width="4"{_dash(is_dashed)}/>'
            )
            yield _text(left + 26, top + 4, name)


def _line(
    one: Series, shown: set[tuple[float, float]], x: Scale, y: Scale, colour: str
) -> Iterator[str]:
    path, is_pen_down = [], False
    for point in one.points:
        if point in shown:
            path.append(f"{'L' if is_pen_down else 'M'}{x.at(point[0]):.1f} {y.at(point[1]):.1f}")
        is_pen_down = point in shown
    if path:
        yield (
            f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"'
            f"{_dash(one.is_dashed)}/>"
        )
    if len(shown) > NUM_POINTS_MAX:
        return
    look = f'fill="{colour}"' if len(shown) <= NUM_CIRCLES_MAX else 'fill-opacity="0"'
    for left, up in sorted(shown):
        yield (
            f'<circle cx="{x.at(left):.1f}" cy="{y.at(up):.1f}" r="3.5" {look}><title>'
            f"{escape(one.name)}: {number(left)}, {number(up)}</title></circle>"
        )


def _group(
    label: str, at: int, bars: Sequence[Bars], left: float, slot: float, y: Scale, *,
    is_stacked: bool,
) -> Iterator[str]:  # fmt: skip
    width = min(64.0, slot * 0.72 / (1 if is_stacked else max(1, len(bars))))
    begin = left + (slot - width * (1 if is_stacked else len(bars))) / 2
    base = 0.0
    for number_, one in enumerate(bars):
        value = one.values[at]
        if not isfinite(value):
            continue
        top, foot = y.at(base + max(value, 0.0)), y.at(base + min(value, 0.0))
        shift = 0.0 if is_stacked else number_ * width
        yield (
            f'<rect x="{begin + shift:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
            f'height="{foot - top:.1f}" fill="{_colour(number_)}"><title>{escape(label)}, '
            f"{escape(one.name)}: {number(value)}</title></rect>"
        )
        base += value if is_stacked else 0.0


def _y_axis(y: Scale, label: str) -> Iterator[str]:
    values = y.ticks()
    for value, text in zip(values, tick_texts(values), strict=True):
        at = y.at(value)
        yield (
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
        )
        yield _text(LEFT - 8, at + 4, text, "end")
    middle = (y.start + y.end) / 2
    yield (
        f'<text x="16" y="{middle:.0f}" transform="rotate(-90 16 {middle:.0f})" '
        f'text-anchor="middle">{escape(label)}</text>'
    )


def _x_axis(x: Scale, y: Scale, label: str) -> Iterator[str]:
    yield (
        f'<line x1="{LEFT}" y1="{y.start:.1f}" x2="{WIDTH - RIGHT}" y2="{y.start:.1f}" '
        'stroke="currentColor" stroke-opacity="0.6"/>'
    )
    values = x.ticks()
    for value, text in zip(values, tick_texts(values), strict=True):
        yield _text(x.at(value), y.start + 18, text, "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, label, "middle")


def _marks(marks: Sequence[Mark], x: Scale, y: Scale) -> Iterator[str]:
    for row, mark in enumerate(marks):
        if mark.is_level:
            x1, x2, y1, y2 = x.start, x.end, y.at(mark.at), y.at(mark.at)
            label = _text(x.end - 4, y1 - 5, mark.label, "end")
        else:
            x1, x2, y1, y2 = x.at(mark.at), x.at(mark.at), y.start, y.end
            is_right = x1 > (x.start + x.end) / 2
            place = y.end + 12 + 15 * (row % MARK_ROWS)
            label = _text(
                x1 + (-5 if is_right else 5), place, mark.label, "end" if is_right else ""
            )
        yield (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            'stroke="currentColor" stroke-opacity="0.7" stroke-dasharray="5 4"/>'
        )
        yield label


def _scale(
    values: Sequence[float], start: float, end: float, *, is_log: bool, from_zero: bool = True
) -> Scale:
    if is_log:
        return logarithmic(values, start, end)
    return linear(values, start, end, from_zero=from_zero)


def _finite(
    points: Sequence[tuple[float, float]], *, log_x: bool, log_y: bool
) -> list[tuple[float, float]]:
    return [
        (x, y)
        for x, y in points
        if isfinite(x) and isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]


def _svg(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="currentColor">\n{body}\n</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{place}>{escape(text)}</text>'


def _cut(label: str, width: float) -> str:
    num_letters = max(3, int(width / LETTER))
    return label if len(label) <= num_letters else label[: num_letters - 1] + "…"


def _colour(number_: int) -> str:
    return COLOURS[number_ % len(COLOURS)]


def _dash(is_dashed: bool) -> str:
    return ' stroke-dasharray="6 4"' if is_dashed else ""

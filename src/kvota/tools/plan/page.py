"""What `kvota plan --html` writes: a plan, or plans side by side, with what they could carry.

The charts: how the memory of a device is split for each storage of the weights; how many requests
of a length its KV holds; and by the roofline, how long the first token and each further one take
with so many requests in flight, and what a step then waits for.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kvota.tools.plan import words
from kvota.tools.plan.pace import Pace
from kvota.tools.plan.planner import Plan
from kvota.tools.plan.recommend import Recommendation
from kvota.tools.plan.snippets import kvota_toml, vllm_serve
from kvota.tools.report.charts import Bars, Mark, Series, bar_chart, line_chart
from kvota.tools.report.html import Report, Section, Table

_GB: Final = 1e9
_SHORTEST: Final = 256  # tokens of a request
_BEYOND: Final = 2  # the charts go to so many times what keeps the targets
_IN_FLIGHT: Final = "requests in flight"
Named = Mapping[str, Plan]


def report(answer: Recommendation) -> Report:
    """The page of one question: the recommendation, and every storage of the weights."""
    plan = answer.plan
    by_method = {one.choice.method.name: one for one in answer.compared}
    sections = [
        Section("Settings", table=_reasons(answer)),
        Section("Memory of each device", table=_bill(plan), charts=[_memory(by_method)]),
        Section("Requests that KV holds", _HELD, charts=[_held(by_method)]),
        Section(
            words.speed_title(plan.hardware),
            words.assumed(plan.hardware),
            Table(*words.speed(plan)),
        ),
        Section("A step, by what it waits for", _STEP, charts=[_step(plan)]),
        *_paces(by_method),
        Section(words.COMPARED_TITLE, _too_large(answer), _compared(answer)),
        *_commands(plan),
    ]
    notes = {f"note {at}": note for at, note in enumerate(plan.shape.notes, start=1)}
    facts = {
        "model": words.model_line(plan),
        "hardware": plan.hardware.source,
        "workload": words.workload(plan),
        **notes,
    }
    return Report(
        f"Plan: {words.heading(plan)}", facts, sections, f"{words.verdict(plan)}.",
        is_bad=bool(plan.misses),
    )  # fmt: skip


def side_by_side(columns: Sequence[tuple[str, Recommendation | str]]) -> Report:
    """The page of --what-if. A text stands for a plan that cannot be."""
    plans = {title: one.plan for title, one in columns if isinstance(one, Recommendation)}
    refused = {title: one for title, one in columns if isinstance(one, str)}
    sections = [Section("Side by side", table=_facts(plans))]
    if plans:
        sections += [
            Section("Memory of each device", charts=[_memory(plans)]),
            Section("Requests that KV holds", _HELD, charts=[_held(plans)]),
            *_paces(plans),
        ]
    sections += [Section(f"{title} cannot be", text) for title, text in refused.items()]
    return Report("Plans side by side", {}, sections, is_bad=not plans)


_HELD = "Of so many tokens each, prompt and answer. The KV of one replica, all of it in use."
_STEP = (
    "Of the recommended plan. A step takes the longer of compute and memory, and the other two on "
    "top. With more than one request in flight, prompts are read beside the decodes."
)
_PACE = (
    "Of one replica, without time in line: where a line crosses the target, one more breaks it. "
    "A line ends where KV memory does, or at twice what keeps the targets."
)


def _reasons(answer: Recommendation) -> Table:
    rows = [(one.setting, one.value, one.why) for one in answer.reasons]
    return Table(("setting", "value", "why"), rows)


def _bill(plan: Plan) -> Table:
    rows = [(what, amount, source) for amount, what, source in words.memory_rows(plan)]
    return Table(("", "size", "known from"), rows)


def _compared(answer: Recommendation) -> Table:
    rows = [
        (f"{one.choice.method.name}, {one.choice.method.title}", *words.compared(one))
        for one in answer.compared
    ]
    return Table(("weights", *words.COMPARED), rows)


def _too_large(answer: Recommendation) -> str:
    return f"Does not fit: {', '.join(answer.too_large)}." if answer.too_large else ""


def _facts(plans: Named) -> Table:
    by_title = {title: words.facts(plan) for title, plan in plans.items()}
    names = list(next(iter(by_title.values()), {}))
    rows = [(name, *(facts[name] for facts in by_title.values())) for name in names]
    return Table(("", *by_title), rows)


def _commands(plan: Plan) -> list[Section]:
    command = vllm_serve(plan)
    found = [Section("Each replica", code=command)] if command is not None else []
    return [*found, Section("kvota.toml", code=kvota_toml(plan))]


def _memory(plans: Named) -> str:
    """One stack for each plan: what a device's memory is for."""
    bills = [plan.memory for plan in plans.values()]
    other = [one.lines[0].num_bytes - one.weight_bytes - one.kv_bytes for one in bills]
    bars = [
        Bars("weights", [one.weight_bytes / _GB for one in bills]),
        Bars("activations, reserve and margin", [num_bytes / _GB for num_bytes in other]),
        Bars("KV", [one.kv_bytes / _GB for one in bills]),
    ]
    return bar_chart(list(plans), bars, "GB of one device", is_stacked=True)


def _held(plans: Named) -> str:
    series = []
    for title, plan in plans.items():
        lengths = _lengths(plan.shape.max_position)
        series.append(Series(title, [(one, plan.num_held(one)) for one in lengths]))
    typical = next(iter(plans.values())).workload.typical_tokens
    marks = [Mark("typical", typical)]
    return line_chart(
        _merged(series),
        "tokens of a request",
        "requests at once",
        log_x=True,
        log_y=True,
        marks=marks,
    )


def _step(plan: Plan) -> str:
    """The parts of a step's time as more and more requests decode in it."""
    pacing = plan.pacing
    numbers = _numbers(plan)
    steps = [pacing.step(number) for number in numbers]
    parts = {
        "whole step": [one.total_s for one in steps],
        "memory bandwidth": [one.memory_s for one in steps],
        "compute": [one.compute_s for one in steps],
        "link between devices": [one.network_s for one in steps],
        "overhead": [one.overhead_s for one in steps],
    }
    series = [
        Series(name, [(at, 1000 * one) for at, one in zip(numbers, values, strict=True)])
        for name, values in parts.items()
        if any(values)
    ]
    marks = [
        Mark("TPOT target", 1000 * plan.workload.tpot_s, is_level=True),
        Mark("recommended", plan.loaded.concurrency),
    ]
    return line_chart(series, _IN_FLIGHT, "ms", marks=marks)


def _paces(plans: Named) -> list[Section]:
    """TTFT and TPOT of each plan, with more and more requests in flight."""
    first = next(iter(plans.values())).workload
    paces = {
        title: [plan.pacing.at(number) for number in _numbers(plan)]
        for title, plan in plans.items()
    }

    def chart(label: str, target_s: float, of: str) -> str:
        series = [
            Series(title, [(one.concurrency, 1000 * _time_s(one, of)) for one in each])
            for title, each in paces.items()
        ]
        marks = [Mark("target", 1000 * target_s, is_level=True)]
        return line_chart(_merged(series), _IN_FLIGHT, label, log_x=True, marks=marks)

    charts = [chart("TTFT in ms", first.ttft_s, "ttft"), chart("TPOT in ms", first.tpot_s, "tpot")]
    return [Section("First token, and each more", _PACE, charts=charts)]


def _merged(series: Sequence[Series]) -> list[Series]:
    """Lines that lie on each other as one with all their names, or the last would hide the rest."""
    names: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for one in series:
        names.setdefault(tuple(one.points), []).append(one.name)
    return [Series(", ".join(same), points) for points, same in names.items()]


def _time_s(pace: Pace, of: str) -> float:
    return pace.ttft_s if of == "ttft" else pace.tpot_s


def _numbers(plan: Plan) -> list[int]:
    """Requests in flight: to twice what is recommended, and no more than KV holds."""
    last = max(1, min(plan.num_typical, _BEYOND * plan.loaded.concurrency))
    return sorted({1, last, *(round(last * at / 24) for at in range(1, 24))} - {0})


def _lengths(longest: int) -> list[int]:
    """Of requests, from short to the longest, each half as long again."""
    found = [min(_SHORTEST, longest)]
    while found[-1] < longest:
        found.append(min(longest, found[-1] * 3 // 2))
    return found

"""A recommendation as people read it, and as a program does. Sizes are powers of ten."""

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvota.tools.plan import words
from kvota.tools.plan.pace import Pace
from kvota.tools.plan.planner import Plan
from kvota.tools.plan.recommend import Reason, Recommendation, kv_name
from kvota.tools.plan.snippets import kvota_toml, vllm_serve

_INDENT: Final = (0, 0, 0, 2)
_WIDE: Final = 100  # columns


def show(answer: Recommendation, console: Console) -> None:
    plan = answer.plan
    console.print(Text(words.heading(plan), style="bold"))
    for line in (
        words.model_line(plan),
        f"hardware: {plan.hardware.source}",
        f"workload: {words.workload(plan)}",
        *plan.shape.notes,
    ):
        console.print(Text(line, style="dim"))
    _section(console, words.verdict(plan), _reasons(answer.reasons))
    _section(console, "Memory of each device", _memory(plan))
    _section(console, words.speed_title(plan.hardware), _speed(plan))
    console.print(Padding(Text(words.assumed(plan.hardware), style="dim"), _INDENT, expand=False))
    is_wide = console.width >= _WIDE
    _section(console, words.COMPARED_TITLE, _compared(answer, has_titles=is_wide))
    if answer.too_large:
        console.print(f"  does not fit: {', '.join(answer.too_large)}")
    if plan.hardware.is_gpu:
        console.print(Padding(Text(words.gguf_line(plan), style="dim"), _INDENT, expand=False))
    command = vllm_serve(plan)
    if command is not None:
        _copyable(console, "Each replica", command)
    _copyable(console, "kvota.toml", kvota_toml(plan))


def show_side_by_side(
    columns: Sequence[tuple[str, Recommendation | str]], console: Console
) -> None:
    """Plans beside each other; a text stands for one that cannot be."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    rows: dict[str, list[str]] = {}
    for index, (title, answer) in enumerate(columns):
        table.add_column(escape(title.replace(",", "\n")), justify="right", overflow="fold")
        facts = words.facts(answer.plan) if isinstance(answer, Recommendation) else {}
        for name in facts:
            rows.setdefault(name, [""] * len(columns))
        for name, cells in rows.items():
            cells[index] = facts.get(name, "–")
    for name, cells in rows.items():
        table.add_row(name, *(escape(cell) for cell in cells))
    console.print(table)
    for title, answer in columns:
        if isinstance(answer, str):
            console.print(f"[bold]{escape(title)}[/bold]: {escape(answer)}", soft_wrap=True)


def as_json(answer: Recommendation) -> dict[str, Any]:
    """Everything that `show` prints, in bytes and seconds."""
    return {
        "recommended": _plan_json(answer.plan),
        "reasons": {one.setting: {"value": one.value, "why": one.why} for one in answer.reasons},
        "compared": [_plan_json(plan) for plan in answer.compared],
        "too_large": list(answer.too_large),
        "kvota_toml": kvota_toml(answer.plan),
        "vllm_serve": vllm_serve(answer.plan),
        "assumed": words.assumed(answer.plan.hardware),
    }


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(body, _INDENT, expand=False))


def _copyable(console: Console, title: str, text: str) -> None:
    """Never wrapped, and without a margin: it is meant to be copied."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Text(text.rstrip()), soft_wrap=True)


def _reasons(reasons: Sequence[Reason]) -> Table:
    table = _table("", "", "")
    for reason in reasons:
        table.add_row(reason.setting, reason.value, escape(reason.why))
    return table


def _memory(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(style="dim")
    for row in words.memory_rows(plan):
        table.add_row(*row)
    return table


def _speed(plan: Plan) -> Table:
    titles, rows = words.speed(plan)
    table = _table(*titles, right=len(titles) - 1)
    for row in rows:
        table.add_row(*row)
    return table


def _compared(answer: Recommendation, *, has_titles: bool) -> Table:
    table = _table("weights", *words.COMPARED, right=len(words.COMPARED))
    for plan in answer.compared:
        method = plan.choice.method
        title = f"  [dim]{escape(method.title)}[/dim]" if has_titles else ""
        style = "bold" if plan is answer.plan else None
        table.add_row(f"{method.name}{title}", *words.compared(plan), style=style)
    return table


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.shape.name,
        "hardware": plan.hardware.name,
        "weights": plan.choice.method.name,
        "weights_bytes": plan.stored_bytes,
        "tensor_parallel": plan.choice.tensor_parallel,
        "kv_cache_dtype": kv_name(plan.choice.cache_type),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "memory": [
            {"bytes": line.num_bytes, "what": line.what, "known_from": line.known_from}
            for line in plan.memory.lines
        ],
        "kv_bytes": plan.memory.kv_bytes,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.loaded.concurrency,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "typical_requests_at_once": plan.num_typical,
        "longest_requests_at_once": plan.num_longest,
        "alone": _pace_json(plan.alone),
        "loaded": _pace_json(plan.loaded),
        "limited_by": plan.limited_by,
        "replicas": None if plan.misses else plan.replicas,
        "devices": None if plan.misses else plan.num_devices,
        "misses": [target.value for target in plan.misses],
    }


def _pace_json(pace: Pace) -> dict[str, Any]:
    return {
        "concurrency": pace.concurrency,
        "ttft_s": pace.ttft_s,
        "tpot_s": pace.tpot_s,
        "output_tokens_per_s": pace.output_tokens_per_s,
        "requests_per_s": pace.requests_per_s,
        "prefill_bound": pace.prefill_bound.value,
        "decode_bound": pace.decode_bound.value,
    }


def _table(first: str, *titles: str, right: int = 0) -> Table:
    """Columns of text, `right` of them flush right."""
    table = Table(box=None, show_header=any((first, *titles)), pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for number, title in enumerate(titles):
        is_figure = number < right
        table.add_column(title, justify="right" if is_figure else "left", no_wrap=is_figure)
    return table

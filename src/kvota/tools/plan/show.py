"""A recommendation as people read it, and as a program does. Sizes are powers of ten."""

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvota.sizing.memory import size
from kvota.tools.plan.footprint import stored_bytes
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.matrices import matrices_of, num_active_params, num_params
from kvota.tools.plan.methods import GPU_METHODS
from kvota.tools.plan.pace import Pace
from kvota.tools.plan.planner import Plan
from kvota.tools.plan.recommend import Reason, Recommendation, kv_name
from kvota.tools.plan.snippets import kvota_toml, vllm_serve

_INDENT: Final = (0, 0, 0, 2)
_COMPARED_TITLE: Final = (
    "Every storage of the weights at its best (devices: replicas × devices of one)"
)


def show(answer: Recommendation, console: Console) -> None:
    plan = answer.plan
    console.print(Text(_heading(plan), style="bold"))
    for line in (_model_line(plan), _workload_line(plan), *plan.shape.notes):
        console.print(Text(line, style="dim"))
    _section(console, _verdict(plan), _reasons(answer.reasons))
    _section(console, "Memory of each device", _memory(plan))
    _section(console, _speed_title(plan.hardware), _speed(plan))
    _section(console, _COMPARED_TITLE, _compared(answer))
    if answer.too_large:
        console.print(f"  does not fit: {', '.join(answer.too_large)}")
    if plan.hardware.is_gpu:
        console.print(Padding(Text(_gguf_line(plan), style="dim"), _INDENT, expand=False))
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
        facts = _facts(answer.plan) if isinstance(answer, Recommendation) else {}
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


def _heading(plan: Plan) -> str:
    return f"{plan.shape.name} on {plan.hardware.title}"


def _model_line(plan: Plan) -> str:
    shape, matrices = plan.shape, matrices_of(plan.shape)
    total, active = num_params(matrices), num_active_params(matrices)
    parts = [f"{total / 1e9:,.3g} B parameters"]
    if shape.experts is not None:
        parts.append(f"{active / 1e9:,.3g} B of them for a token")
    parts.append(f"{shape.num_layers} layers")
    if shape.latent is not None:
        parts.append(f"latent KV of {shape.latent.kv_rank} + {shape.latent.rope_size}")
    else:
        parts.append(f"{shape.num_kv_heads} KV heads of {shape.head_size}")
    if shape.num_windowed:
        parts.append(f"{shape.num_windowed} layers with a window of {shape.window:,}")
    return " · ".join([*parts, f"reads {shape.max_position:,} tokens", shape.origin])


def _workload_line(plan: Plan) -> str:
    work = plan.workload
    return (
        f"workload: {work.prompt_tokens:,} + {work.output_tokens:,} tokens, {work.users:,} at "
        f"once, first token within {work.ttft_s:g} s, then one every {work.tpot_s * 1000:g} ms"
    )


def _verdict(plan: Plan) -> str:
    stored = f"weights {plan.choice.method.name}, KV {kv_name(plan.choice.cache_type)}"
    if plan.misses:
        alone = plan.alone
        return (
            f"Nothing keeps the target for {' and '.join(plan.misses)}: one request alone takes "
            f"{_seconds(alone.ttft_s)} to the first token and {_seconds(alone.tpot_s)} for each "
            f"more. Nearest to it: {stored}"
        )
    on = f"{plan.choice.tensor_parallel} × {plan.hardware.title}"
    if not plan.hardware.is_gpu:
        on = plan.hardware.title if plan.replicas == 1 else "a machine like this"
    several = plan.replicas > 1
    replicas = f"{plan.replicas:,} replicas on {on} each" if several else f"1 replica on {on}"
    return f"Take {replicas}: {stored}"


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
    last = len(plan.memory.lines) - 1
    for number, line in enumerate(plan.memory.lines):
        sign = "−" if line.num_bytes < 0 else "=" if number == last else ""
        table.add_row(f"{sign} {size(abs(line.num_bytes))}", line.what, line.known_from)
    longest = plan.max_model_len
    table.add_row(
        f"{plan.num_typical:,}",
        f"typical requests at once ({plan.workload.typical_tokens:,} tokens)",
        f"{plan.num_longest:,} of max_model_len {longest:,}; {plan.kv_bytes_per_token:,} B a token",
    )
    return table


def _speed_title(hardware: Hardware) -> str:
    efficiency = hardware.efficiency
    known = "measured" if not hardware.is_gpu else "printed"
    return (
        f"Speed of one replica (roofline with {efficiency.memory:.0%} of the {known} bandwidth, "
        f"{efficiency.compute:.0%} of the compute)"
    )


def _speed(plan: Plan) -> Table:
    columns = [("alone", plan.alone)]
    if plan.loaded.concurrency > 1:
        columns.append((f"{plan.loaded.concurrency:,} at once", plan.loaded))
    table = _table("", *(title for title, _ in columns), right=len(columns))
    rows = [_pace_facts(pace) for _, pace in columns]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _pace_facts(pace: Pace) -> dict[str, str]:
    return {
        "first token (TTFT), without a line": _seconds(pace.ttft_s),
        "  waits for": pace.prefill_bound.value,
        "each more (TPOT)": _seconds(pace.tpot_s),
        "  waits for ": pace.decode_bound.value,
        "output tokens/s": f"{pace.output_tokens_per_s:,.0f}",
        "requests/s": f"{pace.requests_per_s:,.3g}",
    }


def _compared(answer: Recommendation) -> Table:
    table = _table(
        "weights",
        "size",
        "devices",
        "KV",
        "at once",
        "TTFT",
        "TPOT",
        "tokens/s",
        "misses",
        right=8,
    )
    for plan in answer.compared:
        choice = plan.choice
        table.add_row(
            f"{choice.method.name}  [dim]{escape(choice.method.title)}[/dim]",
            size(plan.stored_bytes),
            f"{plan.replicas:,} × {choice.tensor_parallel}",
            kv_name(choice.cache_type),
            f"{plan.loaded.concurrency:,}",
            _seconds(plan.loaded.ttft_s),
            _seconds(plan.loaded.tpot_s),
            f"{plan.loaded.output_tokens_per_s:,.0f}",
            ", ".join(plan.misses) or "–",
            style="bold" if plan is answer.plan else None,
        )
    return table


def _gguf_line(plan: Plan) -> str:
    matrices = matrices_of(plan.shape)
    sizes = (
        f"{method.title} {size(stored_bytes(matrices, method))}"
        for method in GPU_METHODS.values()
        if not method.vllm_can
    )
    return f"as GGUF: {' · '.join(sizes)}"


def _facts(plan: Plan) -> dict[str, str]:
    choice, pace = plan.choice, plan.loaded
    return {
        "model": plan.shape.name,
        "hardware": plan.hardware.name,
        "weights": f"{choice.method.name}, {size(plan.stored_bytes)}",
        "tensor parallel": str(choice.tensor_parallel),
        "KV dtype": kv_name(choice.cache_type),
        "KV a token, each device": size(plan.kv_bytes_per_token),
        "KV memory, each device": size(plan.memory.kv_bytes),
        "max_model_len": f"{plan.max_model_len:,}",
        "typical requests that fit": f"{plan.num_typical:,}",
        "longest requests that fit": f"{plan.num_longest:,}",
        "TTFT alone": _seconds(plan.alone.ttft_s),
        "TPOT alone": _seconds(plan.alone.tpot_s),
        "max_num_seqs": f"{pace.concurrency:,}",
        "  limited by": plan.limited_by,
        "TTFT with so many": _seconds(pace.ttft_s),
        "TPOT with so many": _seconds(pace.tpot_s),
        "decode waits for": pace.decode_bound.value,
        "output tokens/s": f"{pace.output_tokens_per_s:,.0f}",
        "replicas": f"{plan.replicas:,}",
        "devices in all": f"{plan.num_devices:,}",
        "misses": " and ".join(plan.misses) or "nothing",
    }


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
        "replicas": plan.replicas,
        "devices": plan.num_devices,
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
        table.add_column(title, justify="right" if number < right else "left")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

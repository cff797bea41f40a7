"""A plan in words and figures, for a terminal and for a page. Sizes are powers of ten."""

from typing import Final

from kvota.sizing.memory import size
from kvota.tools.plan.checkpoint import CHECKPOINT
from kvota.tools.plan.footprint import stored_bytes
from kvota.tools.plan.gguf_shape import STORED
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.matrices import matrices_of, num_active_params, num_params
from kvota.tools.plan.methods import GPU_METHODS
from kvota.tools.plan.pace import Pace
from kvota.tools.plan.planner import Plan
from kvota.tools.plan.recommend import kv_name


def heading(plan: Plan) -> str:
    return f"{plan.shape.name} on {plan.hardware.title}"


def model_line(plan: Plan) -> str:
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


def workload(plan: Plan) -> str:
    work = plan.workload
    return (
        f"{work.prompt_tokens:,} + {work.output_tokens:,} tokens, {work.users:,} at "
        f"once, first token within {work.ttft_s:g} s, then one every {work.tpot_s * 1000:g} ms"
    )


def verdict(plan: Plan) -> str:
    stored = f"weights {_weights(plan)}, KV {kv_name(plan.choice.cache_type)}"
    if plan.misses:
        alone = plan.alone
        return (
            f"Nothing keeps the target for {' and '.join(plan.misses)}: one request alone takes "
            f"{in_units(alone.ttft_s)} to the first token and {in_units(alone.tpot_s)} for each "
            f"more. Nearest to it: {stored}"
        )
    on = f"{plan.choice.tensor_parallel} × {plan.hardware.title}"
    if not plan.hardware.is_gpu:
        on = plan.hardware.title if plan.replicas == 1 else "a machine like this"
    several = plan.replicas > 1
    replicas = f"{plan.replicas:,} replicas on {on} each" if several else f"1 replica on {on}"
    return f"Take {replicas}: {stored}"


def _weights(plan: Plan) -> str:
    method = plan.choice.method
    if method.name == CHECKPOINT:
        return f"as in its checkpoint ({method.title})"
    return method.title if method.name == STORED else method.name


def pace_facts(pace: Pace) -> dict[str, str]:
    return {
        "first token (TTFT), without a line": in_units(pace.ttft_s),
        "  waits for": pace.prefill_bound.value,
        "each more (TPOT)": in_units(pace.tpot_s),
        "  waits for ": pace.decode_bound.value,
        "output tokens/s": f"{pace.output_tokens_per_s:,.0f}",
        "requests/s": f"{pace.requests_per_s:,.3g}",
    }


def gguf_line(plan: Plan) -> str:
    matrices = matrices_of(plan.shape)
    sizes = (
        f"{method.title} {size(stored_bytes(matrices, method))}"
        for method in GPU_METHODS.values()
        if not method.vllm_can
    )
    return f"as GGUF: {' · '.join(sizes)}"


def facts(plan: Plan) -> dict[str, str]:
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
        "TTFT alone": in_units(plan.alone.ttft_s),
        "TPOT alone": in_units(plan.alone.tpot_s),
        "max_num_seqs": f"{pace.concurrency:,}",
        "  limited by": plan.limited_by,
        "TTFT with so many": in_units(pace.ttft_s),
        "TPOT with so many": in_units(pace.tpot_s),
        "decode waits for": pace.decode_bound.value,
        "output tokens/s": f"{pace.output_tokens_per_s:,.0f}",
        "replicas": "–" if plan.misses else f"{plan.replicas:,}",
        "devices in all": "–" if plan.misses else f"{plan.num_devices:,}",
        "misses": " and ".join(plan.misses) or "nothing",
    }


COMPARED_TITLE: Final = (
    "Every storage of the weights at its best (devices: replicas × devices of one)"
)
COMPARED: Final = ("size", "devices", "KV", "at once", "TTFT", "TPOT", "tokens/s", "misses")


def compared(plan: Plan) -> tuple[str, ...]:
    """A storage of the weights as a row under COMPARED.

    Where a target is missed, no number of replicas helps, so only the devices of one are told.
    """
    choice, pace = plan.choice, plan.loaded
    replicas = "–" if plan.misses else f"{plan.replicas:,}"
    return (
        size(plan.stored_bytes),
        f"{replicas} × {choice.tensor_parallel}",
        kv_name(choice.cache_type),
        f"{pace.concurrency:,}",
        in_units(pace.ttft_s),
        in_units(pace.tpot_s),
        f"{pace.output_tokens_per_s:,.0f}",
        ", ".join(plan.misses) or "–",
    )


def memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """The bill of one device, and what its KV holds."""
    last = len(plan.memory.lines) - 1
    rows = []
    for number, line in enumerate(plan.memory.lines):
        sign = "−" if line.num_bytes < 0 else "=" if number == last else ""
        rows.append((f"{sign} {size(abs(line.num_bytes))}", line.what, line.known_from))
    longest = plan.max_model_len
    holds = (
        f"{plan.num_typical:,}",
        f"typical requests at once ({plan.workload.typical_tokens:,} tokens)",
        f"{plan.num_longest:,} of max_model_len {longest:,}; {plan.kv_bytes_per_token:,} B a token",
    )
    return [*rows, holds]


def assumed(hardware: Hardware) -> str:
    """What the shares of the roofline are, and where they come from."""
    return hardware.efficiency.source


def speed_title(hardware: Hardware) -> str:
    efficiency = hardware.efficiency
    known = "measured" if not hardware.is_gpu else "printed"
    assumed = "assumed" if hardware.is_gpu else "fitted"
    return (
        f"Speed of one replica (roofline, {assumed}: {efficiency.memory:.0%} of the {known} "
        f"bandwidth, {efficiency.compute:.0%} of the compute)"
    )


def speed(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The titles of the columns, and the rows."""
    columns = [("alone", plan.alone)]
    if plan.loaded.concurrency > 1:
        columns.append((f"{plan.loaded.concurrency:,} at once", plan.loaded))
    figures = [pace_facts(pace) for _, pace in columns]
    rows = [[name, *(of[name] for of in figures)] for name in figures[0]]
    return ["", *(title for title, _ in columns)], rows


def in_units(seconds: float) -> str:
    """Three digits, in milliseconds or seconds."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

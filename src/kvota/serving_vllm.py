"""`kvota serve --engine vllm MODEL`: vLLM behind the gateway, with flags that are computed.

The memory bill is the planner's (`tools/plan`), drawn for the GPU that is here; from it come how
much vLLM may take, how long a request may be and how many run at once. Every flag is shown with its
reason. Where the machine or the model is not known well enough for a bill, vLLM's own defaults
stand, and that is said. What the operator gives in `vllm_arguments` comes last and wins.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvota.config import Config
from kvota.core.errors import ConfigError, KvotaError
from kvota.gateway.node_life import Bounds
from kvota.gateway.own_node import NodePlan
from kvota.gateway.upstream.kinds import BackendKind
from kvota.kv.layout import CacheType
from kvota.node.options import EngineSettings
from kvota.serving import ANSWER_GRACE_S, SILENCE_MIN_S
from kvota.sizing.vllm import Flag, VllmBill, Wishes, arguments, vllm_flags
from kvota.tools.plan.footprint import StepLimits, activation_bytes
from kvota.tools.plan.matrices import matrices_of, num_params
from kvota.tools.plan.question import read_model
from kvota.tools.plan.shape import ModelShape

BATCHED_TOKENS: Final = 8192  # vLLM's default for online serving on large GPUs
SEQS_ASSUMED: Final = 256  # for the size of the logits, before the number is computed
FP8_CAPABILITY: Final = 8.9  # Ada and later
START_TIMEOUT_S: Final = 1800.0  # weights may have to come over a network
SILENT_PATIENCE_S: Final = 60.0  # its health page waits for a step now and then
_NUM_SEQS: Final = "--max-num-seqs"
_MIB: Final = 2**20
_OUTSIDE_TORCH: Final = 60 * _MIB
_GRAPH_PER_LAYER: Final = 20 * _MIB
_QUERY: Final = "memory.total,memory.used,compute_cap"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU of this machine. `capability` as NVIDIA counts: 9.0 is Hopper."""

    total_bytes: int
    used_bytes: int
    capability: float


def vllm_plan(settings: Config) -> NodePlan:
    """What to start. Shows the flags on standard error. Raises StartupError."""
    flags = _shown_flags(settings)
    port = _free_port()
    model = settings.model
    name = model.served_name or Path(model.model).name
    command = (
        *_command(settings.gateway.vllm_command, model.model),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", name,
        "--enable-prompt-tokens-details",  # in usage: tokens that the prefix cache had
        *arguments(flags), *settings.gateway.vllm_arguments,
    )  # fmt: skip
    return NodePlan(
        command=lambda directory, socket: command,
        environment=os.environ,
        bounds=Bounds(
            silent_patience_s=SILENT_PATIENCE_S,
            drain_timeout_s=settings.server.drain_timeout_s,
            start_timeout_s=START_TIMEOUT_S,
        ),
        growth_bytes_max=None,  # it says nothing of what it plans to hold
        answer_timeout_s=settings.desk.request_timeout_s + ANSWER_GRACE_S,
        silence_max_s=SILENCE_MIN_S,
        kind=BackendKind.VLLM,
        max_running_requests=_num_at_once(settings, command),
        max_waiting_queue=settings.desk.max_waiting_queue,
        url=f"http://127.0.0.1:{port}",
    )


def require_command(command: Sequence[str]) -> None:
    """Raises ConfigError where there is no such program, with what would help."""
    if not command or shutil.which(command[0]) is None:
        name = command[0] if command else "nothing"
        raise ConfigError(
            f"vLLM cannot be started: there is no command {name} here. Install vLLM and have its "
            "directory in PATH, or name what starts it: vllm_command in [gateway]."
        )


def _num_at_once(settings: Config, command: Sequence[str]) -> int:
    """What the gateway's desk lets run: as many as vLLM does, unless the operator wants other."""
    wanted = settings.engine.max_running_requests
    if wanted != EngineSettings().max_running_requests:
        return wanted
    words = " ".join(command).replace("=", " ").split()
    numbers = [after for word, after in pairwise(words) if word == _NUM_SEQS]
    return int(numbers[-1]) if numbers and numbers[-1].isdigit() else wanted


def _command(base: Sequence[str], model: str) -> tuple[str, ...]:
    """`vllm serve` takes the model by place; its module, and what else stands in, by name alone."""
    return (*base, model) if base[-1] == "serve" else (*base, "--model", model)


def _shown_flags(settings: Config) -> Sequence[Flag]:
    screen = Console(stderr=True, highlight=False)
    try:
        flags = computed_flags(settings, this_gpu())
    except ConfigError as unknown:
        screen.print(
            f"[yellow]Note:[/yellow] vLLM's own defaults stand: {escape(unknown.message)}",
            soft_wrap=True,
        )
        return ()
    wide = max(len(flag.name) + len(flag.value) for flag in flags) + 1
    for flag in flags:
        shown = f"{flag.name} {flag.value}"
        screen.print(f"{shown:<{wide}}  [dim]{escape(flag.reason)}[/dim]", soft_wrap=True)
    return flags


def computed_flags(settings: Config, gpu: Gpu | None) -> Sequence[Flag]:
    """Raises ConfigError where no bill can be drawn, InsufficientMemory where none adds up."""
    if gpu is None:
        raise ConfigError("nvidia-smi shows no GPU here.")
    try:
        shape, _ = read_model(settings.model.model)
    except KvotaError as error:
        raise ConfigError(error.message) from error
    bill = draw_vllm_bill(shape, _weight_bytes(settings.model.model, shape), gpu)
    wishes = Wishes(
        context_max=shape.max_position,
        max_model_len=settings.model.max_model_len,
        has_fp8=gpu.capability >= FP8_CAPABILITY,
    )
    return vllm_flags(bill, wishes)


def draw_vllm_bill(shape: ModelShape, weight_bytes: int, gpu: Gpu) -> VllmBill:
    """What vLLM will count on one GPU."""
    layout = shape.kv_layout(CacheType.F16)
    longest = shape.max_position
    limits = StepLimits(max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=SEQS_ASSUMED)
    return VllmBill(
        device_bytes=gpu.total_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes(shape, limits, 1),
        outside_torch_bytes=_OUTSIDE_TORCH,
        graph_bytes=_GRAPH_PER_LAYER * shape.num_layers,
        others_bytes=gpu.used_bytes,
        kv_bytes_per_token=-(-layout.bytes_of(longest) // longest),
    )


def this_gpu() -> Gpu | None:
    """The first GPU that nvidia-smi shows; None without one."""
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        total, used, capability = said.stdout.splitlines()[0].split(",")
        return Gpu(int(total) * _MIB, int(used) * _MIB, float(capability))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _weight_bytes(model: str, shape: ModelShape) -> int:
    """Of the files, where they are here; else 16 bits for each parameter, as most are published."""
    files = list(Path(model).expanduser().glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files)
    return 2 * num_params(matrices_of(shape))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

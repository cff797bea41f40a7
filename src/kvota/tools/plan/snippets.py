"""The plan as configuration: a `kvota.toml`, and the command line of `vllm serve`."""

import json
import shlex
from typing import Final

from kvota.kv.layout import CacheType
from kvota.tools.plan.catalogue import CATALOGUE
from kvota.tools.plan.planner import Plan

_FIRST_PORT: Final = 8001


def vllm_serve(plan: Plan) -> str | None:
    """One replica's command line; None where kvota's own engine serves."""
    if not plan.hardware.is_gpu:
        return None
    options = [("--tensor-parallel-size", str(plan.choice.tensor_parallel))]
    options += [("--gpu-memory-utilization", f"{plan.memory.utilization:.2f}")]
    options += [("--max-model-len", str(plan.max_model_len))]
    options += [("--max-num-seqs", str(plan.loaded.concurrency))]
    options += [("--max-num-batched-tokens", str(plan.max_num_batched_tokens))]
    if plan.choice.cache_type is CacheType.F8:
        options += [("--kv-cache-dtype", "fp8")]
    flags = plan.choice.method.flags
    lines = [shlex.join(("vllm", "serve", _served(plan), *flags)), *map(shlex.join, options)]
    command = " \\\n  ".join(lines)
    if plan.choice.method.needs_checkpoint:
        return f"# Name a checkpoint with {plan.choice.method.name} weights:\n{command}"
    return command


def kvota_toml(plan: Plan) -> str:
    """Settings of a node of ours, or of a gateway in front of the replicas."""
    return _gateway_toml(plan) if plan.hardware.is_gpu else _node_toml(plan)


def _node_toml(plan: Plan) -> str:
    lines = [
        "[model]",
        f"model = {_quoted(_local(plan))}{_from_where(plan)}",
        f'weights = "{plan.choice.method.name}"',
        f'kv_cache_dtype = "{plan.choice.cache_type.label}"',
        f"max_model_len = {plan.max_model_len}",
        "",
        "[engine]",
        f"max_running_requests = {plan.loaded.concurrency}",
        f"max_num_batched_tokens = {plan.max_num_batched_tokens}",
    ]
    return "\n".join(lines) + "\n"


def _gateway_toml(plan: Plan) -> str:
    """Backends on this host; where they really are is for the operator to fill in."""
    names = [f"gpu-{number}" for number in range(1, plan.replicas + 1)]
    lines: list[str] = []
    for number, name in enumerate(names):
        lines += [
            "[[backends]]",
            f'name = "{name}"',
            f'url = "http://127.0.0.1:{_FIRST_PORT + number}"',
            'kind = "vllm"',
            f"max_running_requests = {plan.loaded.concurrency}",
            f"max_model_len = {plan.max_model_len}",
            "",
        ]
    listed = ", ".join(f'"{name}"' for name in names)
    lines += [
        "[[models]]",
        f"name = {_quoted(plan.shape.name)}",
        f"backends = [{listed}]",
        f"served_as = {_quoted(_served(plan))}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A basic string of TOML, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def _local(plan: Plan) -> str:
    """A model of the catalogue must be fetched first: kvota serves what lies on disk."""
    return _served(plan) if not _is_known(plan) else f"./{_served(plan).split('/')[1]}"


def _from_where(plan: Plan) -> str:
    return f"  # a copy of {_served(plan)}, or its GGUF file" if _is_known(plan) else ""


def _is_known(plan: Plan) -> bool:
    return plan.shape.origin.startswith(CATALOGUE)


def _served(plan: Plan) -> str:
    """What the engine is told to load: the repository or the file the shape was read from."""
    origin = plan.shape.origin
    if _is_known(plan):
        return origin.removeprefix(CATALOGUE)
    return origin.removesuffix("config.json").rstrip("/") or "."

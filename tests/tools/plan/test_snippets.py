"""The configuration that comes out is one that its readers take."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvota.config import load
from kvota.kv.layout import CacheType
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.methods import GPU_METHODS
from kvota.tools.plan.planner import Plan
from kvota.tools.plan.recommend import Wanted, recommend
from kvota.tools.plan.snippets import kvota_toml, vllm_serve
from kvota.tools.plan.workload import Workload
from tests.support.plan_machine import CPU


def planned(model: str, hardware: Hardware, wanted: Wanted | None = None, users: int = 16) -> Plan:
    return recommend(known_model(model), hardware, Workload(users=users), wanted).plan


def test_a_node_starts_with_the_settings_of_the_plan(tmp_path: Path) -> None:
    plan = planned("smollm2-135m", CPU)
    file = tmp_path / "kvota.toml"
    file.write_text(kvota_toml(plan))
    config = load(file=file)
    assert config.model.weights == plan.choice.method.name == "int8"
    assert config.model.kv_cache_dtype == "f16"
    assert config.model.max_model_len == plan.max_model_len
    assert config.engine.max_running_requests == plan.loaded.concurrency
    assert config.engine.max_num_batched_tokens == plan.max_num_batched_tokens
    assert vllm_serve(plan) is None


def test_a_gateway_knows_every_replica(tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", known_device("h100-sxm"), users=600)
    file = tmp_path / "kvota.toml"
    file.write_text(kvota_toml(plan))
    fleet = load(file=file).fleet
    assert len(fleet.backends) == plan.replicas > 1
    assert {backend.kind.value for backend in fleet.backends} == {"vllm"}
    assert {backend.max_running_requests for backend in fleet.backends} == {plan.loaded.concurrency}
    assert fleet.models[0].backends == tuple(backend.name for backend in fleet.backends)
    assert fleet.models[0].served_as == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_name_with_quotes_and_backslashes_survives(tmp_path: Path) -> None:
    odd = replace(planned("smollm2-135m", CPU).shape, name='a"b', origin='C:\\models\\a"b\\x.gguf')
    file = tmp_path / "kvota.toml"
    file.write_text(kvota_toml(recommend(odd, CPU, Workload()).plan))
    assert load(file=file).model.model == odd.origin
    file.write_text(kvota_toml(recommend(odd, known_device("l4"), Workload()).plan))
    assert load(file=file).fleet.models[0].name == odd.name


def test_vllm_is_told_what_was_planned() -> None:
    wanted = Wanted(
        method=GPU_METHODS["fp8"], tensor_parallel=2, cache_type=CacheType.F8, devices_max=8
    )
    plan = planned("llama-3.3-70b", known_device("h100-sxm"), wanted)
    command = vllm_serve(plan)
    assert command is not None
    words = [word for word in shlex.split(command) if word.strip()]
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--quantization": "fp8",
        "--tensor-parallel-size": "2",
        "--gpu-memory-utilization": f"{plan.memory.utilization:.2f}",
        "--max-model-len": str(plan.max_model_len),
        "--max-num-seqs": str(plan.loaded.concurrency),
        "--max-num-batched-tokens": str(plan.max_num_batched_tokens),
        "--kv-cache-dtype": "fp8",
    }


@pytest.mark.parametrize(("method", "has_note"), [("awq", True), ("int8", True), ("fp8", False)])
def test_what_vllm_cannot_quantize_itself_needs_another_checkpoint(
    method: str, has_note: bool
) -> None:
    plan = planned("llama-3.1-8b", known_device("l4"), Wanted(method=GPU_METHODS[method]))
    command = vllm_serve(plan) or ""
    assert command.startswith("#") is has_note
    assert "\nvllm serve" in f"\n{command}"

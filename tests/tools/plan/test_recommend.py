"""Which configuration wins, and that its reasons are true."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.kv.layout import CacheType
from kvota.tools.plan import words
from kvota.tools.plan.catalogue import devices, known_device, known_model, models
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.methods import GPU_METHODS
from kvota.tools.plan.recommend import Recommendation, Wanted, recommend
from kvota.tools.plan.workload import Workload
from tests.support.plan_machine import CPU


def ask(model: str, device: str, wanted: Wanted | None = None, **workload: float) -> Recommendation:
    work = Workload(**workload)  # type: ignore[arg-type]
    return recommend(known_model(model), known_device(device), work, wanted)


def why(answer: Recommendation, setting: str) -> str:
    return next(one.why for one in answer.reasons if one.setting == setting)


def test_weights_stay_as_trained_where_nothing_coarser_saves_a_device() -> None:
    answer = ask("llama-3.1-8b", "h100-sxm")
    assert answer.plan.choice.method.name == "bf16"
    assert answer.plan.num_devices == 1
    assert why(answer, "weights") == "no coarser one saves a device"


def test_coarser_weights_are_taken_when_they_save_a_device() -> None:
    answer = ask("llama-3.1-8b", "l4", users=64)
    assert (answer.plan.choice.method.name, answer.plan.num_devices) == ("fp8", 1)
    assert why(answer, "weights") == "bf16 would take 2 devices instead of 1"
    assert why(answer, "KV dtype") == "16 bits would take 2 devices instead of 1"


def test_a_model_too_large_for_one_device_is_spread() -> None:
    answer = ask("llama-3.3-70b", "a100-80")
    assert answer.plan.choice.tensor_parallel == 2
    bf16 = ask("deepseek-v2", "h100-sxm", Wanted(method=GPU_METHODS["bf16"], devices_max=8))
    assert bf16.plan.choice.tensor_parallel == 8
    assert why(bf16, "tensor parallel") == "on fewer devices weights and one request do not fit"


def test_what_was_settled_is_kept() -> None:
    wanted = Wanted(
        method=GPU_METHODS["awq"], tensor_parallel=4, cache_type=CacheType.F8, devices_max=8
    )
    answer = ask("llama-3.3-70b", "h100-sxm", wanted)
    choice = answer.plan.choice
    assert (choice.method.name, choice.tensor_parallel, choice.cache_type) == (
        "awq",
        4,
        CacheType.F8,
    )
    for setting in ("weights", "tensor parallel", "KV dtype"):
        assert why(answer, setting) == "as asked"


def test_more_users_take_more_replicas() -> None:
    few, many = (ask("llama-3.1-8b", "h100-sxm", users=users).plan for users in (100, 1000))
    assert few.replicas == 1
    assert many.replicas == -(-1000 // many.users_per_replica)
    assert many.replicas > few.replicas


def test_where_nothing_keeps_the_targets_the_nearest_is_shown() -> None:
    answer = ask("llama-2-70b", "t4", tpot_s=0.005)
    assert answer.plan.misses
    assert why(answer, "weights") == "comes nearest to the targets"
    assert why(answer, "replicas") == "no number of them makes one request faster"
    assert answer.plan.replicas == 1
    assert words.compared(answer.plan)[1] == f"– × {answer.plan.choice.tensor_parallel}"
    assert words.facts(answer.plan)["replicas"] == words.facts(answer.plan)["devices in all"] == "–"


@pytest.mark.parametrize(
    ("hardware", "cache_type", "names"),
    [(known_device("h100-sxm"), CacheType.U8, "f16, f8"), (CPU, CacheType.F8, "f16, u8, f32")],
)
def test_a_kv_type_that_the_engine_does_not_have_is_refused(
    hardware: Hardware, cache_type: CacheType, names: str
) -> None:
    with pytest.raises(ConfigError, match=f"keeps no KV in {cache_type.label}: use one of {names}"):
        recommend(known_model("llama-3.2-1b"), hardware, Workload(), Wanted(cache_type=cache_type))


def test_where_the_shares_of_the_roofline_come_from_is_said() -> None:
    assert "assumptions" in words.assumed(known_device("l4"))
    assert "assumed: 80%" in words.speed_title(known_device("l4"))
    assert "measured" in words.assumed(CPU)


def test_what_fits_nowhere_is_refused_with_the_numbers() -> None:
    with pytest.raises(InsufficientMemory, match=r"deepseek-v3 does not fit on 8 × NVIDIA T4"):
        ask("deepseek-v3", "t4")


def test_every_storage_is_compared_and_those_that_do_not_fit_are_named() -> None:
    answer = ask("deepseek-v3", "h200")
    assert [plan.choice.method.name for plan in answer.compared] == ["fp8", "int8", "awq", "gptq"]
    assert answer.too_large == ("bf16",)
    assert why(ask("deepseek-v3", "h100-sxm"), "weights") == "bf16, fp8, int8 would not fit"


@settings(deadline=None, max_examples=25)
@given(
    model=st.sampled_from(sorted(models())),
    device=st.sampled_from(sorted(devices())),
    users=st.integers(1, 2000),
)
def test_no_compared_plan_keeps_the_targets_on_fewer_devices(
    model: str, device: str, users: int
) -> None:
    try:
        answer = ask(model, device, users=users)
    except InsufficientMemory:
        return
    best = answer.plan
    assert all(reason.why and reason.value for reason in answer.reasons)
    for other in answer.compared:
        if not other.misses:
            assert not best.misses
            assert best.num_devices <= other.num_devices


@pytest.mark.parametrize(
    ("model", "lacking"),
    [
        ("deepseek-v2-lite", "no latent attention and no experts"),
        ("mixtral-8x7b", "no experts"),
        ("gemma-3-270m", "no norms after a layer's parts"),
    ],
)
def test_what_our_own_engine_cannot_run_is_not_planned_on_a_cpu(model: str, lacking: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot run {model}: it has {lacking}"):
        recommend(known_model(model), CPU, Workload())

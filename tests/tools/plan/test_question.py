"""Words to questions: where a model comes from, and what --what-if may change."""

import json
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError, ModelError
from kvota.kv.layout import CacheType
from kvota.tools.plan import words
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.question import Question, cache_type, read_hardware, read_model, varied
from tests.support.tiny_gguf import write_gguf
from tests.tools.plan.test_hf_shape import LLAMA


@pytest.fixture
def question() -> Question:
    return Question(
        shape=known_model("llama-3.1-8b"), stored=None, hardware=known_device("h100-sxm")
    )


def test_a_model_is_a_name_a_config_a_directory_or_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_gguf(tmp_path / "tiny.gguf")
    assert read_model("qwen3-8b")[0].name == "qwen3-8b"
    assert read_model(str(tmp_path))[0] == read_model(str(tmp_path / "config.json"))[0]
    shape, stored = read_model(str(tmp_path / "tiny.gguf"))
    assert shape.name == "tiny"
    assert stored is not None


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_model(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="neither a path"):
        read_model(str(tmp_path / "nothing"))


def test_a_gguf_file_is_planned_as_it_is_on_a_gpu(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    shape, stored = read_model(str(tmp_path / "tiny.gguf"))
    asked = Question(shape=shape, stored=stored, hardware=known_device("l4"))
    short = varied(asked, "prompt=20,output=10")
    assert short.answer().plan.choice.method is stored
    assert short.answer().reasons[0].why == "as in the file"
    assert "weights as in the file, mostly F32" in words.verdict(short.answer().plan)


def test_hardware_is_a_known_device() -> None:
    assert read_hardware("L40S").title == "NVIDIA L40S"
    with pytest.raises(ConfigError, match="no known hardware"):
        read_hardware("l41")


def test_kv_types_may_be_written_as_kvota_or_as_vllm_does() -> None:
    names = ("f16", "auto", "fp8", "F8", "u8", "int8")
    types = [cache_type(name) for name in names]
    assert types == [CacheType.F16, CacheType.F16, CacheType.F8, CacheType.F8] + [CacheType.U8] * 2


def test_what_if_changes_several_things_at_once(question: Question) -> None:
    other = varied(question, "weights=awq, tp=2,kv=fp8,users=64,hardware=l40s,ttft=1.5")
    choice = other.answer().plan.choice
    assert (choice.method.name, choice.tensor_parallel) == ("awq", 2)
    assert choice.cache_type is CacheType.F8
    assert (other.workload.users, other.workload.ttft_s) == (64, 1.5)
    assert other.hardware.name == "l40s"
    assert question.workload.users == 16


def test_what_if_may_change_the_model(question: Question) -> None:
    assert varied(question, "model=qwen3-8b").shape.name == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("awq", "write 'awq' as name=value"),
        ("weight=awq", "cannot change 'weight'. Did you mean weights"),
        ("color=red", "There are model, hardware, weights"),
        ("tp=two", "tp=two: that is no number"),
        ("users=0", "users must be at least 1"),
    ],
)
def test_what_is_not_understood_is_named(question: Question, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        varied(question, text)

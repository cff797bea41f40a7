"""config.json: what is read, what is implied, and which field is named when it is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvota.core.errors import ModelError
from kvota.tools.plan.hf_shape import read_config, shape_of
from kvota.tools.plan.shape import ModelShape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def shape(**changes: Any) -> ModelShape:
    values = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return shape_of(values, name="x", origin="config.json")


def test_i01_kv_heads_are_a_count_and_not_a_group_size() -> None:
    assert shape().kv_layout().bytes_per_token == 131_072
    assert shape(num_key_value_heads=32).kv_layout().bytes_per_token == 524_288
    assert shape(num_key_value_heads=None).kv_layout().bytes_per_token == 524_288


@pytest.mark.parametrize(
    ("changes", "bytes_per_token"),
    [
        ({"hidden_size": 2560, "head_dim": 128, "num_hidden_layers": 36}, 147_456),
        (
            {
                "hidden_size": 5120,
                "num_attention_heads": 96,
                "head_dim": 128,
                "num_hidden_layers": 10,
            },
            40_960,
        ),
    ],
)
def test_i02_a_stated_head_dim_wins(changes: dict[str, Any], bytes_per_token: int) -> None:
    assert shape(**changes).kv_layout().bytes_per_token == bytes_per_token


def test_i02_without_one_it_is_hidden_over_heads() -> None:
    assert shape().head_size == 128
    with pytest.raises(ModelError, match=r"head_dim is missing.*5120 does not divide.*96"):
        shape(hidden_size=5120, num_attention_heads=96, num_key_value_heads=8)


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is missing; it must be a whole number"):
        shape(**{field: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"num_hidden_layers": 2**63}, "num_hidden_layers is .*; it must be at most 10,000"),
        ({"hidden_size": 10**300}, "hidden_size is .*; it must be at most 1,000,000,000"),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "n_shared_experts": -1,
            },
            "n_shared_experts is -1; it must be at least 0",
        ),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5; it must be a divisor"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; it must be at most num_local_experts, which is 8",
        ),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "moe_intermediate_size is missing"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim is missing"),
        (
            {"model_type": "mistral", "sliding_window": 4096, "layer_types": ["full_attention"]},
            "layer_types is .* it must be a list of 32 names",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape(**changes)


@pytest.mark.parametrize(
    ("changes", "num_windowed"),
    [
        ({"model_type": "llama", "sliding_window": 4096}, 0),
        ({"model_type": "mistral", "sliding_window": 4096}, 32),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 20,
            },
            12,
        ),
        ({"model_type": "gemma2", "sliding_window": 4096}, 16),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}, 27),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            16,
        ),
    ],
)
def test_each_family_has_its_windows(changes: dict[str, Any], num_windowed: int) -> None:
    assert shape(**changes).num_windowed == num_windowed


def test_an_unknown_family_is_read_as_a_llama_and_says_so() -> None:
    unknown = shape(model_type="llamatron")
    assert unknown.kv_layout() == shape().kv_layout()
    assert "'llamatron' is not known here" in unknown.notes[0]
    assert shape().notes == ()


def test_a_model_with_eyes_keeps_its_text_config_one_level_down() -> None:
    nested = shape_of({"model_type": "gemma3", "text_config": LLAMA}, name="x", origin="c")
    assert nested.num_layers == 32
    assert "only the language model" in nested.notes[0]


def test_a_directory_stands_for_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder).name == "my-model"
    assert read_config(folder / "config.json") == read_config(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a list, not an object")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=message):
        read_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)

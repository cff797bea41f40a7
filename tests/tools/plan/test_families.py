"""Configs as publishers write them: what they leave out, stretch, mix, or cannot be planned by."""

from typing import Any

import pytest

from kvota.core.errors import ModelError
from kvota.tools.plan.hf_shape import shape_of
from kvota.tools.plan.matrices import matrices_of, num_active_params, num_params
from kvota.tools.plan.shape import ModelShape
from tests.tools.plan.test_hf_shape import shape


def read(**config: Any) -> ModelShape:
    return shape_of(config, name="x", origin="config.json")


def test_gemma_3_4b_is_read_from_the_few_fields_that_its_text_config_states() -> None:
    gemma = read(
        model_type="gemma3",
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        vision_config={"hidden_size": 1152},
    )
    assert num_params(matrices_of(gemma)) == 3_880_263_168
    assert (gemma.max_position, gemma.num_windowed) == (131_072, 29)
    assert "num_attention_heads 8" in gemma.notes[1]


def test_llava_leaves_all_sizes_to_the_llama_class() -> None:
    llava = read(
        model_type="llava",
        text_config={"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    )
    assert llava.kv_layout().bytes_per_token == 512 * 1024
    assert llava.max_position == 4096


def test_what_a_text_config_says_null_to_is_not_filled_in() -> None:
    pixtral = read(
        model_type="pixtral", text_config={"model_type": "mistral", "sliding_window": None}
    )
    assert pixtral.window is None


def test_tied_embeddings_may_be_stated_beside_the_text_config() -> None:
    text = {"model_type": "llama"}
    assert read(model_type="x", tie_word_embeddings=True, text_config=text).tied_embeddings
    untied = text | {"tie_word_embeddings": False}
    assert not read(model_type="x", tie_word_embeddings=True, text_config=untied).tied_embeddings


def test_a_missing_field_outside_a_text_config_stays_missing() -> None:
    with pytest.raises(ModelError, match="num_attention_heads is missing"):
        read(model_type="gemma3_text", hidden_size=2560, num_hidden_layers=34)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32_768),
        ({"type": "dynamic", "factor": 2.0}, 16_384),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "default"}, 8192),
    ],
)
def test_a_stretched_context_is_as_long_as_vllm_derives_it(
    scaling: dict[str, Any] | None, positions: int
) -> None:
    assert shape(rope_scaling=scaling).max_position == positions


def test_a_stretch_that_is_no_number_is_named() -> None:
    with pytest.raises(ModelError, match=r"rope_scaling\.factor is 'four'"):
        shape(rope_scaling={"type": "linear", "factor": "four"})


def test_stated_windows_count_in_every_family() -> None:
    types = ["sliding_attention"] * 24 + ["full_attention"] * 8
    stated = shape(model_type="olmo3", sliding_window=4096, layer_types=types)
    assert stated.num_windowed == 24


def test_llama_4_scout_has_its_17_billion_active_parameters_and_three_quarters_in_chunks() -> None:
    scout = read(
        model_type="llama4",
        text_config={
            "model_type": "llama4_text",
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 202_048,
            "max_position_embeddings": 10_485_760,
            "attention_chunk_size": 8192,
        },
    )
    assert num_params(matrices_of(scout)) / 1e9 == pytest.approx(107.8, abs=0.05)
    assert num_active_params(matrices_of(scout)) / 1e9 == pytest.approx(17.2, abs=0.1)
    assert (scout.window, scout.num_windowed) == (8192, 36)


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 16),
        ({"mlp_only_layers": [0, 31]}, 2),
        ({"first_k_dense_replace": 3}, 3),
    ],
)
def test_layers_without_experts_are_counted(changes: dict[str, Any], num_dense: int) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    read_in = shape(**experts, **changes).experts
    assert read_in is not None
    assert read_in.num_dense_layers == num_dense


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, "'linear_attention'"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern is there"),
        ({"attn_layer_period": 8}, "attn_layer_period is there"),
        ({"state_size": 16}, "state_size is there"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true; only decoders"),
    ],
)
def test_what_keeps_another_memory_than_kv_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        shape(**changes)

from pathlib import Path
from typing import Any

import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.architecture import Architecture, Rope, RopeKind
from kvota.model.hf_config import architecture_of, read_json
from tests.support.family_cases import family_cases, rope_cases
from tests.support.reference import rope_frequencies
from tests.support.tiny_models import config_json, tiny_architecture, tiny_ropes

CASES = family_cases() | rope_cases()


def read(family: str = "llama", **changes: Any) -> Architecture:
    """What a tiny model's config says once these keys are changed (None: left out)."""
    merged = config_json(tiny_architecture(family, sliding_window=None)) | changes
    kept = {key: value for key, value in merged.items() if value is not None}
    return architecture_of(kept, "config.json")


@pytest.mark.parametrize("name", CASES)
def test_a_config_comes_back_as_the_architecture_it_was_written_from(name: str) -> None:
    assert architecture_of(config_json(CASES[name]), "config.json") == CASES[name]


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim", "expected"),
    [(2560, 32, 128, 128), (5120, 96, 128, 128), (4096, 32, None, 128)],
)
def test_a_stated_head_dim_wins_over_hidden_by_heads(
    hidden: int, heads: int, head_dim: int | None, expected: int
) -> None:
    architecture = read(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=head_dim
    )
    assert architecture.head_size == expected


def test_a_head_dim_that_is_neither_stated_nor_whole_is_refused() -> None:
    with pytest.raises(ModelError, match=r"head_dim is missing.*5120.*96 heads"):
        read(hidden_size=5120, num_attention_heads=96, head_dim=None)


def test_an_absent_tie_flag_means_what_the_architecture_means() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        assert not read(family, tie_word_embeddings=None).tied_embeddings
        assert read(family, tie_word_embeddings=True).tied_embeddings


def test_smollm3_is_tied_and_turns_slowly_unless_it_says_otherwise() -> None:
    plain = read("smollm3", tie_word_embeddings=None, rope_theta=None)
    assert plain.tied_embeddings
    assert plain.rope.theta == 2_000_000
    assert not read("smollm3", tie_word_embeddings=False).tied_embeddings


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, (False, True, True, False)),
        ({"no_rope_layers": None}, (True, True, True, False)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, (True, False, True, False)),
    ],
)
def test_the_layers_of_smollm3_without_rope(
    keys: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    assert read("smollm3", **keys).rope_layers == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"no_rope_layers": [1, 1, 0]},
        {"no_rope_layers": [1, 1, 1, 2]},
        {"no_rope_layers": [1, 1, 1, [0]]},
        {"no_rope_layers": 4},
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
    ],
)
def test_senseless_layers_without_rope_are_named(keys: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no_rope_layer"):
        read("smollm3", **keys)


def test_a_window_of_smollm3_is_on_the_layers_without_rope_if_it_is_used() -> None:
    window = {"sliding_window": 24}
    assert read("smollm3", **window, use_sliding_window=None).sliding_window is None
    used = read("smollm3", **window, use_sliding_window=True)
    assert (used.sliding_window, used.sliding_layers) == (24, (False, False, False, True))
    named = ["sliding_attention", *["full_attention"] * 3]
    own = read("smollm3", **window, use_sliding_window=True, layer_types=named)
    assert own.sliding_layers == (True, False, False, False)


def test_without_architectures_the_model_type_decides() -> None:
    assert read("qwen3", architectures=None).family == "qwen3"


# J03: every spelling of rope scaling; the arithmetic is in test_rope.py and test_families.py.


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "rope_type": "linear", "factor": 4},
        {"rope_type": "linear", "factor": 4.0, "finetuned": True, "note": "x"},
    ],
)
def test_both_spellings_of_rope_scaling_are_equal(scaling: dict[str, Any]) -> None:
    expected = Rope(theta=10000.0, kind=RopeKind.LINEAR, factor=4.0)
    assert read(rope_scaling=scaling).rope == expected
    new_style = {"rope_theta": 10000.0} | scaling
    assert read(rope_scaling=None, rope_theta=None, rope_parameters=new_style).rope == expected


def test_new_rope_parameters_carry_their_own_theta() -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    rope = read(rope_scaling=None, rope_theta=None, rope_parameters=parameters).rope
    assert rope == Rope(theta=500000.0)
    assert read(rope_theta=None).rope.theta == 10000.0


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "none"}])
def test_no_scaling_in_any_spelling_is_plain(scaling: dict[str, Any] | None) -> None:
    assert read(rope_scaling=scaling).rope.kind is RopeKind.PLAIN


def test_llama3_frequencies_are_those_of_the_reference() -> None:
    wanted = tiny_ropes()["llama3"]
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = read(rope_scaling=scaling).rope
    assert rope_frequencies(rope, 16, 256) == pytest.approx(rope_frequencies(wanted, 16, 256))


def test_yarn_reaches_factor_times_the_original_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for stated in (64, 256):
        architecture = read(rope_scaling=scaling, max_position_embeddings=stated)
        assert architecture.max_position == 256
        assert architecture.rope.original_max_position == 64


def test_yarn_without_the_original_length_stretches_the_stated_one() -> None:
    architecture = read(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64)
    assert (architecture.max_position, architecture.rope.original_max_position) == (256, 64)


def test_yarn_without_a_factor_takes_it_from_the_two_lengths() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 64}
    assert read(rope_scaling=scaling, max_position_embeddings=256).rope.factor == 4.0


def test_dynamic_stretches_the_stated_length_and_linear_has_it_stretched_already() -> None:
    dynamic = read(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    assert (dynamic.max_position, dynamic.rope.original_max_position) == (128, 64)
    linear = read(rope_scaling={"type": "linear", "factor": 2.0}, max_position_embeddings=64)
    assert (linear.max_position, linear.rope.original_max_position) == (64, None)


def test_longrope_takes_its_original_length_from_beside_the_table() -> None:
    factors = [1.0] * 8
    scaling = {"type": "su", "short_factor": factors, "long_factor": factors}
    architecture = read(
        rope_scaling=scaling, original_max_position_embeddings=64, max_position_embeddings=256
    )
    assert architecture.rope.kind is RopeKind.LONGROPE
    assert architecture.rope.factor == 4.0
    assert architecture.max_position == 256


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "foo", "factor": 2.0}, "rope scaling 'foo'.*Supported: default, linear"),
        ({"type": 7, "factor": 2.0}, "rope scaling '7'"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate"),
        ({"full_attention": {"rope_type": "default"}}, "differ between layers"),
    ],
)
def test_unknown_rope_is_refused_and_never_read_as_plain(
    scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "two kinds, linear and yarn"),
        ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
        ({"rope_type": "linear", "factor": "4"}, "factor is '4'"),
        ({"rope_type": "linear", "factor": -1}, "factor is -1; it must be a number above 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "llama3", "factor": 2.0}, "original_max_position_embeddings is missing"),
        (
            {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64},
            "low_freq_factor is missing",
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0},
            "short_factor is missing",
        ),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 7,
                "long_factor": [1.0] * 8,
            },
            "7 rope factors for 8",
        ),
        ({"rope_type": "yarn", "factor": 1e308}, "max_position is 4611686018427387904"),
        ("linear", "rope_scaling is 'linear'"),
    ],
)
def test_rope_settings_that_make_no_sense_are_named(scaling: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(rope_scaling=scaling)
    assert caught.value.message.startswith("config.json: ")


def test_windows_follow_each_familys_rule() -> None:
    assert read("llama", sliding_window=8).sliding_window is None
    assert read("mistral", sliding_window=8).sliding_window == 8
    assert read("qwen2", sliding_window=8).sliding_window is None
    on = {"sliding_window": 8, "use_sliding_window": True}
    assert read("qwen2", **on).sliding_window is None  # from layer 28 on, and there are two
    half = read("qwen3", **on, max_window_layers=1)
    assert (half.sliding_window, half.sliding_layers) == (8, (False, True))
    assert read("qwen2", **on, max_window_layers=0).sliding_layers is None
    listed = read("qwen2", **on, layer_types=["sliding_attention", "full_attention"])
    assert listed.sliding_layers == (True, False)


def test_an_absent_window_is_the_classs_and_null_is_none() -> None:
    config = config_json(tiny_architecture("mistral", sliding_window=None))
    assert architecture_of(config, "config.json").sliding_window is None
    del config["sliding_window"]
    assert architecture_of(config, "config.json").sliding_window == 4096
    on = {"use_sliding_window": True, "max_window_layers": 0}
    assert read("qwen3", **on).sliding_window == 4096
    assert read("qwen3").sliding_window is None


def test_an_absent_head_dim_is_the_classs_where_it_has_one() -> None:
    assert read("qwen3", head_dim=None).head_size == 128
    assert read("llama", head_dim=None).head_size == 16


def test_part_of_the_head_may_turn() -> None:
    assert read(partial_rotary_factor=0.5).rope.rotary_dim == 8
    with pytest.raises(ModelError, match="rope turns 5 of the 16"):
        read(partial_rotary_factor=0.34)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Supported: LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM.*Supported.*SmolLM3"),
        ({"architectures": None, "model_type": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq.*as GGUF"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with awq"),
        ({"quantization_config": {"load_in_8bit": True}}, "an unnamed method"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        read(**changes)
    assert "Supported: " in caught.value.message


def test_an_unknown_layer_type_is_refused() -> None:
    types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="layer type 'chunked_attention'"):
        read("qwen2", sliding_window=8, use_sliding_window=True, layer_types=types)
    with pytest.raises(ModelError, match="a list of 2 names"):
        read("qwen2", sliding_window=8, use_sliding_window=True, layer_types=types[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; it must be a whole number"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
    ],
)
def test_a_key_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)


@pytest.mark.parametrize("family", ["smollm3", "qwen2"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(family: str) -> None:
    with pytest.raises(ModelError, match=r"num_layers is 1152921504606846976; it must lie between"):
        read(family, num_hidden_layers=2**60, no_rope_layers=None, use_sliding_window=True)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[1]", "holds a list"), ("\x80", "JSON")]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=message) as caught:
        read_json(path)
    assert str(path) in caught.value.message

"""The encoder against a plain reference, alone and in batches; and what a bad directory is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.encoder import load_encoder
from kvota.model.encoder_source import is_encoder, open_encoder
from tests.support.tiny_encoder import CONFIG, WORDS, reference_vector, write_tiny_encoder

TEXTS = ([2, 4, 6, 3], [2, 3], [2, 5, 8, 9, 10, 7, 1, 3], [2, 9, 4, 3])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_the_reference(tmp_path: Path, activation: str, pooling: str) -> None:
    mode = {"mean": "mean_tokens", "cls": "cls_token"}[pooling]
    weights = write_tiny_encoder(tmp_path, pooling=mode, hidden_act=activation)
    found = load_encoder(tmp_path, num_threads=1).embed(TEXTS)
    for vector, tokens in zip(found, TEXTS, strict=True):
        wanted = reference_vector(weights, tokens, pooling=pooling, activation=activation)
        np.testing.assert_allclose(vector, wanted, atol=2e-5)


def test_padding_is_not_looked_at(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path)
    encoder = load_encoder(tmp_path, num_threads=1)
    [alone] = encoder.embed([TEXTS[1]])
    np.testing.assert_allclose(encoder.embed(TEXTS)[1], alone, atol=1e-6)


def test_without_the_normalizing_module_lengths_stay(tmp_path: Path) -> None:
    weights = write_tiny_encoder(tmp_path, is_normalized=False)
    [vector] = load_encoder(tmp_path, num_threads=1).embed([TEXTS[0]])
    wanted = reference_vector(weights, TEXTS[0], is_normalized=False)
    assert abs(np.linalg.norm(wanted) - 1.0) > 0.1
    np.testing.assert_allclose(vector, wanted, atol=5e-5)


def test_weights_may_carry_the_models_name(tmp_path: Path) -> None:
    weights = write_tiny_encoder(tmp_path, prefix="bert.", pooling=None)
    [vector] = load_encoder(tmp_path, num_threads=1).embed([TEXTS[0]])
    np.testing.assert_allclose(vector, reference_vector(weights, TEXTS[0]), atol=2e-5)


def test_texts_are_framed_and_limits_read(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path, max_len=16)
    encoder = load_encoder(tmp_path, num_threads=1)
    assert [WORDS[token] for token in encoder.encode("The SUNY moon")] == [
        "[CLS]", "the", "sun", "##y", "moon", "[SEP]",
    ]  # fmt: skip
    assert (encoder.max_len, encoder.num_dimensions, encoder.vocab_size) == (16, 24, len(WORDS))


def test_without_a_trained_length_the_table_of_positions_is_the_limit(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path, max_len=None)
    encoder = load_encoder(tmp_path, num_threads=1)
    assert encoder.max_len == CONFIG["max_position_embeddings"]
    assert encoder.embed([[4] * encoder.max_len]).shape == (1, 24)


def test_an_encoder_is_told_from_a_model_that_writes(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path / "encoder")
    (tmp_path / "writer").mkdir()
    (tmp_path / "writer" / "config.json").write_text('{"model_type": "llama"}')
    assert is_encoder(tmp_path / "encoder")
    assert not is_encoder(tmp_path / "writer")
    assert not is_encoder(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("spelled", "pooling"), [("cls", "cls"), (["cls"], "cls"), ("mean", "mean")]
)
def test_pooling_is_read_as_it_is_spelled_since_2025(
    tmp_path: Path, spelled: str | list[str], pooling: str
) -> None:
    """It was not known, and the mean was taken without a word."""
    write_tiny_encoder(tmp_path)
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"embedding_dimension": 24, "pooling_mode": spelled}))
    assert open_encoder(tmp_path).shape.pooling == pooling


def test_pooling_is_read_where_the_modules_say(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path, pooling="cls_token")
    (tmp_path / "1_Pooling").rename(tmp_path / "1_Other")
    kinds = ("Transformer", "Pooling")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    modules[1]["path"] = "1_Other"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    shape = open_encoder(tmp_path).shape
    assert (shape.pooling, shape.is_normalized) == ("cls", False)


@pytest.mark.parametrize(
    ("pooling", "module", "words"),
    [
        ("lasttoken", "Normalize", "pools by lasttoken"),
        (["mean", "max"], "Normalize", "pools by max, pooling_mode_mean_tokens"),
        ("mean", "Dense", r"modules.json.*Dense"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    tmp_path: Path, pooling: object, module: str, words: str
) -> None:
    write_tiny_encoder(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    modules = [{"type": f"models.{kind}"} for kind in ("Transformer", "Pooling", module)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match=words):
        open_encoder(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_modules_that_are_none_are_named(tmp_path: Path, content: str) -> None:
    write_tiny_encoder(tmp_path)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        open_encoder(tmp_path)


def test_positions_that_the_table_lacks_are_refused(tmp_path: Path) -> None:
    """They were read as zeros."""
    write_tiny_encoder(tmp_path, max_len=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ModelError, match=r"may have 64 tokens, and .* has 32 rows"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "swish"}, "activation is swish"),
        ({"position_embedding_type": "relative_key"}, "positions are not absolute"),
        ({"pooling": "max_tokens"}, "pools by pooling_mode_max_tokens"),
    ],
)
def test_what_cannot_be_computed_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_tiny_encoder(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 5}, "24 is no multiple of 5 heads"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
        ({"num_hidden_layers": 3}, "encoder.layer.2.* is missing"),
        ({"intermediate_size": 41}, r"shape \[40, 24\].*\[41, 24\]"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps is 'x'"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"max_position_embeddings": 2}, "may have 2 tokens, and one of a single token has 3"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write_tiny_encoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ModelError, match=words) as caught:
        load_encoder(tmp_path)
    assert caught.value.message.startswith(str(tmp_path))


def test_a_tokenizer_of_another_model_is_told_from_its_ids(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["snow"] = 700
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"ids up to 700, but the model 11 tokens") as caught:
        load_encoder(tmp_path)
    assert caught.value.message.startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["a" * 300, "nul\0", "no/such"])
def test_what_cannot_be_a_path_is_no_encoder(name: str) -> None:
    assert not is_encoder(Path(name))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load_encoder(tmp_path)

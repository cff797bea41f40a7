"""Every family in every format against the oracle: file → reader → graph → kernels → logits.

f32 weights and f32 KV differ from the float64 reference by 5e-5 at most on logits of a spread of
1.3 to 1.7; the tolerance leaves room for kernels of other machines.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.core.request import SamplingParams
from kvota.model.architecture import RopeKind
from kvota.model.source import open_source
from tests.support.family_cases import family_cases, rope_cases
from tests.support.model_runs import (
    all_logits,
    exact_executor,
    generated,
    logits_by_sequence,
    whole_chunk,
)
from tests.support.reference import reference_logits
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import (
    FAMILIES,
    NUM_STRETCHED,
    TinyModel,
    fixed_tokens,
    random_weights,
    tiny_architecture,
    tiny_ropes,
    write_safetensors,
)

TOLERANCE = 3e-4
CASES = family_cases() | rope_cases()
# What GGUF cannot say: a window in these families, dynamic rope, a factor of its own for yarn,
# which layers of SmolLM3 have no rope.
NOT_IN_GGUF = {
    "qwen2_half_sliding",
    "llama_dynamic",
    "llama_yarn_attention_factor",
    "llama_yarn_mscale",
    "smollm3_sliding",
}
GGUF_CASES = [name for name in CASES if name not in NOT_IN_GGUF]


def assert_like_the_reference(tiny: TinyModel) -> None:
    """Architecture and weights as written, and all logits right, whole and in chunks of 23."""
    source = open_source(tiny.path)
    assert source.architecture == tiny.architecture
    assert source.weights.keys() == tiny.weights.keys()
    num_tokens = min(tiny.architecture.max_position, 204)
    tokens = fixed_tokens(num_tokens, tiny.architecture.vocab_size)
    expected = reference_logits(tiny.architecture, tiny.weights, tokens)
    executor = exact_executor(source)
    whole = all_logits(executor, tokens, chunk_max=num_tokens)
    assert whole.shape == expected.shape
    np.testing.assert_allclose(whole, expected, atol=TOLERANCE)
    chunked = all_logits(executor, tokens, chunk_max=23)
    np.testing.assert_allclose(chunked, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_safetensors_model_computes_the_reference(name: str, tmp_path: Path) -> None:
    architecture = CASES[name]
    assert_like_the_reference(write_safetensors(tmp_path, architecture=architecture))


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_model_computes_the_reference(name: str, tmp_path: Path) -> None:
    architecture = CASES[name]
    assert_like_the_reference(write_gguf(tmp_path / "tiny.gguf", architecture=architecture))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_files_compute_with_their_rounded_values(dtype: Any, tmp_path: Path) -> None:
    assert_like_the_reference(write_safetensors(tmp_path, "qwen3", dtype=dtype, shards=2))


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantized_files_compute_with_their_rounded_values(
    family: str, quant: str, tmp_path: Path
) -> None:
    assert_like_the_reference(write_gguf(tmp_path / "tiny.gguf", family, quant=quant))


@pytest.mark.parametrize("family", FAMILIES)
def test_forty_greedy_tokens_are_the_references(family: str, tmp_path: Path) -> None:
    """One reference pass over the whole text: each token is the most likely after those before."""
    tiny = write_safetensors(tmp_path, family)
    prompt = fixed_tokens(30, tiny.architecture.vocab_size)
    tokens = generated(exact_executor(tmp_path), prompt, 40)
    logits = reference_logits(tiny.architecture, tiny.weights, [*prompt, *tokens])[29:-1]
    assert tokens == logits.argmax(axis=1).tolist()
    best_two = np.sort(logits, axis=1)[:, -2:]
    assert np.diff(best_two).min() > TOLERANCE, "a near tie proves nothing: take another prompt"


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_share_steps_compute_what_they_compute_alone(
    family: str, tmp_path: Path
) -> None:
    """One reads its prompt in pieces while the other, begun earlier, already decodes."""
    tiny = write_safetensors(tmp_path, family)
    early, late = (fixed_tokens(70, tiny.architecture.vocab_size, seed=seed) for seed in (1, 2))
    other_table = (1, 8, 4)
    steps = [
        [whole_chunk(early[:64])],
        [
            whole_chunk(early[64:65], 64),
            whole_chunk(late[:33], sequence_id=1, table=other_table),
        ],
        [
            whole_chunk(late[33:], 33, sequence_id=1, table=other_table),
            whole_chunk(early[65:66], 65),
        ],
    ]
    found = logits_by_sequence(exact_executor(tmp_path), steps)
    for sequence_id, tokens in ((0, early[:66]), (1, late)):
        expected = reference_logits(tiny.architecture, tiny.weights, tokens)
        np.testing.assert_allclose(found[sequence_id], expected, atol=TOLERANCE)


class TestTiedEmbeddings:
    """`tie_word_embeddings` true, false or absent, with and without an output layer in the file."""

    def open(self, folder: Path, *, flag: bool | None, head: str) -> TinyModel:
        """Write a model whose output layer is `absent`, `own`, or `equal` to the embedding."""
        weights = dict(random_weights(tiny_architecture("llama")))
        if head == "absent":
            del weights["lm_head.weight"]
        elif head == "equal":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        config = {"tie_word_embeddings": flag}
        write_safetensors(folder, weights=weights, config=config, with_tokenizer=False)
        architecture = replace(tiny_architecture("llama"), tied_embeddings=bool(flag))
        return TinyModel(folder, architecture, weights)

    def assert_computes(self, tiny: TinyModel) -> None:
        tokens = fixed_tokens(20, tiny.architecture.vocab_size)
        expected = reference_logits(tiny.architecture, tiny.weights, tokens)
        logits = all_logits(exact_executor(tiny.path), tokens, chunk_max=20)
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)

    @pytest.mark.parametrize("head", ["absent", "equal", "own"])
    def test_a_tied_model_uses_its_embedding(self, head: str, tmp_path: Path) -> None:
        self.assert_computes(self.open(tmp_path, flag=True, head=head))

    def test_only_an_output_layer_that_is_thrown_away_is_worth_a_warning(
        self, tmp_path: Path
    ) -> None:
        for head, num_warnings in (("absent", 0), ("equal", 0), ("own", 1)):
            tiny = self.open(tmp_path / head, flag=True, head=head)
            warnings = open_source(tiny.path).warnings
            assert len(warnings) == num_warnings, warnings
            assert all("lm_head.weight" in warning for warning in warnings)

    @pytest.mark.parametrize("flag", [False, None])
    def test_an_untied_model_uses_its_output_layer(self, flag: bool | None, tmp_path: Path) -> None:
        self.assert_computes(self.open(tmp_path, flag=flag, head="own"))

    @pytest.mark.parametrize("flag", [False, None])
    def test_an_untied_model_without_one_is_refused(
        self, flag: bool | None, tmp_path: Path
    ) -> None:
        self.open(tmp_path, flag=flag, head="absent")
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            open_source(tmp_path)


class TestRopeSpellings:
    """The same rope in every spelling that config.json files in the field have."""

    PLAIN = tiny_architecture("llama")

    def opened(self, folder: Path, config: dict[str, Any]) -> Any:
        write_safetensors(folder, config=config, with_tokenizer=False)
        return open_source(folder).architecture

    @pytest.mark.parametrize(
        "table",
        [
            {"type": "linear", "factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
            {"type": "linear", "rope_type": "linear", "factor": 4.0},
            {"rope_type": "linear", "factor": 4, "finetuned": True},
        ],
    )
    def test_linear(self, table: dict[str, Any], tmp_path: Path) -> None:
        architecture = self.opened(tmp_path, {"rope_scaling": table})
        assert architecture.rope == tiny_ropes()["linear"]

    @pytest.mark.parametrize("table", [None, {"rope_type": "default"}, {"type": "default"}])
    def test_plain(self, table: dict[str, Any] | None, tmp_path: Path) -> None:
        architecture = self.opened(tmp_path, {"rope_scaling": table})
        assert architecture.rope == self.PLAIN.rope

    def test_theta_and_kind_in_one_table(self, tmp_path: Path) -> None:
        table = {"rope_type": "linear", "factor": 4.0, "rope_theta": 123.0}
        config = {"rope_parameters": table, "rope_theta": None, "rope_scaling": None}
        architecture = self.opened(tmp_path, config)
        assert architecture.rope == replace(tiny_ropes()["linear"], theta=123.0)

    @pytest.mark.parametrize("kind", ["yarn", "dynamic"])
    def test_the_context_is_the_trained_length_times_the_factor(
        self, kind: str, tmp_path: Path
    ) -> None:
        architecture = replace(self.PLAIN, rope=tiny_ropes()[kind])
        write_safetensors(tmp_path, architecture=architecture, with_tokenizer=False)
        assert open_source(tmp_path).architecture.max_position == NUM_STRETCHED == 64 * 4

    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_an_unknown_kind_is_refused_and_not_read_as_plain(
        self, key: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedModel, match="foo"):
            self.opened(tmp_path, {"rope_scaling": {key: "foo", "factor": 2.0}})


def test_a_table_of_ones_in_a_gguf_changes_nothing(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    tiny = write_gguf(tmp_path / "tiny.gguf", extra_tensors=ones)
    assert open_source(tiny.path).architecture.rope.kind is RopeKind.PLAIN
    assert_like_the_reference(tiny)


def test_a_stretched_table_in_a_gguf_is_used(tmp_path: Path) -> None:
    architecture = tiny_architecture("llama", rope=tiny_ropes()["llama3"])
    tiny = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    assert open_source(tiny.path).architecture.rope.kind is RopeKind.FACTORS


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_an_odd_vocabulary_is_sampled_to_its_last_token_and_not_beyond(
    suffix: str, tmp_path: Path
) -> None:
    """J06. Flat logits: over 1,000 draws nearly every one of the 323 tokens comes up."""
    architecture = tiny_architecture("llama", vocab_size=323)
    if suffix == "gguf":
        path = write_gguf(tmp_path / "tiny.gguf", architecture=architecture).path
    else:
        path = write_safetensors(tmp_path, architecture=architecture).path
    executor = exact_executor(path)
    seen: set[int] = set()
    for seed in range(5):
        params = SamplingParams(temperature=50.0, seed=seed)
        seen |= set(generated(executor, [1, 2, 3], 200, params))
    assert max(seen) <= 322
    assert len(seen) > 280


def test_two_shards_compute_what_one_file_computes(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one", "qwen2")
    write_safetensors(tmp_path / "two", "qwen2", shards=2)
    tokens = fixed_tokens(40, 320)
    one, two = (all_logits(exact_executor(tmp_path / n), tokens, 40) for n in ("one", "two"))
    np.testing.assert_array_equal(one, two)


def test_a_file_beside_the_index_is_not_read(tmp_path: Path) -> None:
    tiny = write_safetensors(tmp_path, "llama", shards=2)
    other = tmp_path / "other"
    strangers = random_weights(tiny.architecture, seed=99)
    write_safetensors(other, "llama", weights=strangers, with_tokenizer=False)
    (other / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_like_the_reference(tiny)


def test_extra_keys_of_a_config_change_nothing(tmp_path: Path) -> None:
    extra = {"pretraining_tp": 1, "use_cache": True, "initializer_range": 0.02}
    tiny = write_safetensors(tmp_path, "llama", config=extra)
    assert "use_cache" in json.loads((tmp_path / "config.json").read_text())
    assert open_source(tmp_path).architecture == tiny.architecture

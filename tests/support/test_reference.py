"""The oracle against Hugging Face's logits, published numbers, and properties of the formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvota.model.architecture import Architecture, Rope, RopeKind
from tests.support.family_cases import family_cases, num_golden_tokens, rope_cases
from tests.support.reference import (
    dynamic_theta,
    greedy_tokens,
    reference_logits,
    rope_attention_factor,
    rope_frequencies,
    rope_table,
    rotate,
)
from tests.support.tiny_models import fixed_tokens, random_weights, tiny_architecture

GOLDEN = Path(__file__).parent.parent / "golden" / "families.json"
CASES = family_cases() | rope_cases()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text())
    return content


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_hugging_face(name: str, golden: dict[str, Any]) -> None:
    architecture, theirs = CASES[name], golden["cases"][name]
    tokens = fixed_tokens(num_golden_tokens(architecture), architecture.vocab_size)
    logits = reference_logits(architecture, random_weights(architecture), tokens)
    chosen = logits[theirs["positions"]]
    # Theirs rotate and normalize in float32 even in a float64 model: 8e-5 at most over all logits.
    np.testing.assert_allclose(chosen[:, theirs["tokens"]], theirs["logits"], atol=1e-4)
    np.testing.assert_allclose(np.log(np.exp(chosen).sum(1)), theirs["log_normalizer"], atol=1e-4)
    assert chosen.argmax(axis=1).tolist() == theirs["most_likely"]


def test_every_golden_case_is_checked(golden: dict[str, Any]) -> None:
    assert set(golden["cases"]) == set(CASES)


def test_every_case_has_logits_of_its_own(golden: dict[str, Any]) -> None:
    """A switch that changed nothing would be tested by nothing."""
    ends = {name: tuple(case["logits"][-1]) for name, case in golden["cases"].items()}
    assert ends.pop("mistral_no_window") == ends["llama"]  # the same model by another name
    assert len(set(ends.values())) == len(ends)


def test_a_later_token_changes_no_earlier_logit() -> None:
    architecture = tiny_architecture("qwen3")
    weights = random_weights(architecture)
    tokens = fixed_tokens(12, architecture.vocab_size)
    changed = [*tokens[:8], 5, 6, 7, 8]
    before = reference_logits(architecture, weights, tokens)
    after = reference_logits(architecture, weights, changed)
    np.testing.assert_array_equal(before[:8], after[:8])
    assert np.abs(before[8:] - after[8:]).max() > 0.1


def test_a_token_that_left_every_window_is_forgotten() -> None:
    """Two layers with a window of 24 see 1 + 2·23 tokens back at most."""
    architecture = tiny_architecture("mistral", sliding_window=24)
    weights = random_weights(architecture)
    tokens = fixed_tokens(60, architecture.vocab_size)
    changed = [(tokens[0] + 1) % architecture.vocab_size, *tokens[1:]]
    before = reference_logits(architecture, weights, tokens)
    after = reference_logits(architecture, weights, changed)
    np.testing.assert_array_equal(before[47:], after[47:])
    assert (np.abs(before[:47] - after[:47]).max(axis=1) > 0).all()


def test_greedy_tokens_are_the_most_likely_ones() -> None:
    architecture = tiny_architecture("llama")
    weights = random_weights(architecture)
    out = greedy_tokens(architecture, weights, [1, 2, 3], 4)
    whole = reference_logits(architecture, weights, [1, 2, 3, *out])
    assert out == whole[2:-1].argmax(axis=1).tolist()


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    architecture = tiny_architecture("llama")
    cos, sin = rope_table(architecture, 40)
    chance = np.random.RandomState(0)
    query = rotate(np.repeat(chance.standard_normal((1, 16)), 40, axis=0), cos, sin)
    key = rotate(np.repeat(chance.standard_normal((1, 16)), 40, axis=0), cos, sin)
    np.testing.assert_allclose((query**2).sum(1), (query[0] ** 2).sum(), rtol=1e-12)
    scores = query @ key.T
    for distance in (0, 3, 17):
        np.testing.assert_allclose(np.diagonal(scores, -distance), scores[distance, 0], rtol=1e-9)


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    architecture = tiny_architecture("llama", rope=Rope(theta=10000.0, rotary_dim=8))
    cos, sin = rope_table(architecture, 5)
    assert cos.shape == (5, 4)
    x = np.random.RandomState(0).standard_normal((5, 16))
    turned = rotate(x, cos, sin)
    np.testing.assert_array_equal(turned[:, 8:], x[:, 8:])
    assert np.abs(turned[1:, :8] - x[1:, :8]).max() > 0.1


LLAMA_3_1 = Rope(
    theta=500000.0, kind=RopeKind.LLAMA3, factor=8.0, original_max_position=8192
)  # as published in Llama-3.1-8B's config.json


def test_llama3_keeps_fast_pairs_and_slows_down_slow_ones() -> None:
    """Head size 128: wavelengths under 2,048 stay, those over 8,192 are stretched eightfold."""
    plain = rope_frequencies(Rope(theta=500000.0), 128, 131072)
    ratio = plain / rope_frequencies(LLAMA_3_1, 128, 131072)
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 2048], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 8.0, rtol=1e-12)
    between = ratio[(wavelengths >= 2048) & (wavelengths <= 8192)]
    assert len(between) == 6
    assert (np.diff(between) > 0).all()


def test_frequency_factors_can_say_what_llama3_says() -> None:
    plain = rope_frequencies(Rope(theta=500000.0), 128, 131072)
    stretched = rope_frequencies(LLAMA_3_1, 128, 131072)
    divisors = tuple((plain / stretched).tolist())
    stored = Rope(theta=500000.0, kind=RopeKind.FACTORS, frequency_factors=divisors)
    np.testing.assert_allclose(rope_frequencies(stored, 128, 131072), stretched, rtol=1e-12)


def test_yarn_of_the_published_qwen_setting() -> None:
    """Factor 4 over 32,768, theta 1e6, head size 128: pairs to 23 stay, from 40 on are stretched.

    23 = floor(64·ln(32768/(32·2π))/ln 1e6) and 40 = ceil(64·ln(32768/2π)/ln 1e6).
    """
    rope = Rope(theta=1e6, kind=RopeKind.YARN, factor=4.0, original_max_position=32768)
    ratio = rope_frequencies(Rope(theta=1e6), 128, 131072) / rope_frequencies(rope, 128, 131072)
    np.testing.assert_allclose(ratio[:24], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[40:], 4.0, rtol=1e-12)
    assert (np.diff(ratio[23:41]) > 0).all()
    assert rope_attention_factor(rope) == pytest.approx(1.138629, abs=1e-6)


def test_yarn_attention_factor_from_two_mscales_or_as_given() -> None:
    """DeepSeek's pair 0.707/0.707 cancels out."""
    rope = Rope(theta=1e4, kind=RopeKind.YARN, factor=40.0, original_max_position=4096)
    assert rope_attention_factor(replace(rope, mscale=0.707, mscale_all_dim=0.707)) == 1.0
    assert rope_attention_factor(replace(rope, mscale=1.0, mscale_all_dim=0.5)) == pytest.approx(
        (0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1)
    )
    assert rope_attention_factor(replace(rope, attention_factor=0.9)) == 0.9


def test_longrope_attention_factor_of_the_published_phi3_setting() -> None:
    """sqrt(1 + ln 32 / ln 4096) for a context of 4,096 stretched to 131,072."""
    rope = Rope(theta=1e4, kind=RopeKind.LONGROPE, factor=32.0, original_max_position=4096)
    assert rope_attention_factor(rope) == pytest.approx(1.190238, abs=1e-6)


def test_dynamic_base_grows_only_past_the_trained_length() -> None:
    """10,000·3^(128/126) for twice the trained length and factor 2."""
    rope = Rope(theta=1e4, kind=RopeKind.DYNAMIC, factor=2.0, original_max_position=2048)
    assert dynamic_theta(rope, 128, 4096) == pytest.approx(1e4 * 3 ** (128 / 126))
    assert dynamic_theta(rope, 128, 2048) == 1e4
    assert dynamic_theta(rope, 128, 100) == 1e4


def test_linear_divides_every_frequency() -> None:
    plain = rope_frequencies(Rope(theta=1e4), 64, 4096)
    linear = rope_frequencies(Rope(theta=1e4, kind=RopeKind.LINEAR, factor=2.5), 64, 4096)
    np.testing.assert_allclose(plain / linear, 2.5, rtol=1e-12)


def test_a_tied_model_does_not_look_at_a_head() -> None:
    architecture: Architecture = tiny_architecture("llama", tied_embeddings=True)
    weights = dict(random_weights(architecture))
    expected = reference_logits(architecture, weights, [1, 2, 3])
    weights["lm_head.weight"] = np.zeros_like(weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(reference_logits(architecture, weights, [1, 2, 3]), expected)

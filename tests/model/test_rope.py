"""Rotary frequencies against the reference's, and what each rule promises."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvota.core.errors import UnsupportedModel
from kvota.model.architecture import Rope, RopeKind
from kvota.model.rope import rotation
from tests.support.reference import rope_attention_factor, rope_frequencies
from tests.support.tiny_models import NUM_STRETCHED, NUM_TRAINED, tiny_ropes

HEAD_SIZE = 64
ROPES = tiny_ropes(head_size=HEAD_SIZE)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("context_len", [NUM_TRAINED, NUM_STRETCHED])
def test_every_kind_turns_as_the_reference_does(name: str, context_len: int) -> None:
    turn = rotation(ROPES[name], HEAD_SIZE, context_len)
    expected = rope_frequencies(ROPES[name], HEAD_SIZE, context_len)
    np.testing.assert_allclose(turn.frequencies, expected, rtol=1e-6)
    assert turn.scale == pytest.approx(rope_attention_factor(ROPES[name]))


def test_plain_frequencies_are_powers_of_theta() -> None:
    turn = rotation(Rope(theta=10_000.0), 4, 100)
    np.testing.assert_allclose(turn.frequencies, [1.0, 0.01])
    assert turn.scale == 1.0


def test_linear_slows_every_pair_alike() -> None:
    plain = rotation(ROPES["plain"], HEAD_SIZE, 256).frequencies
    linear = replace(ROPES["plain"], kind=RopeKind.LINEAR, factor=4.0)
    np.testing.assert_allclose(rotation(linear, HEAD_SIZE, 256).frequencies * 4.0, plain, rtol=1e-6)


def test_dynamic_is_plain_within_the_trained_context_and_slower_beyond() -> None:
    dynamic = ROPES["dynamic"]
    plain = rotation(replace(dynamic, kind=RopeKind.PLAIN), HEAD_SIZE, 1).frequencies
    for within in (1, NUM_TRAINED):
        np.testing.assert_allclose(rotation(dynamic, HEAD_SIZE, within).frequencies, plain)
    beyond = rotation(dynamic, HEAD_SIZE, NUM_STRETCHED).frequencies
    assert beyond[0] == plain[0]
    assert (beyond[1:] < plain[1:]).all()


def test_llama3_keeps_fast_pairs_and_slows_slow_ones_by_the_factor() -> None:
    llama3 = ROPES["llama3"]
    plain = rotation(replace(llama3, kind=RopeKind.PLAIN), HEAD_SIZE, 256).frequencies
    ratio = rotation(llama3, HEAD_SIZE, 256).frequencies / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1.0 / llama3.factor)
    assert (np.diff(ratio) <= 1e-7).all()


def test_longrope_takes_long_factors_only_for_a_context_beyond_the_trained_one() -> None:
    longrope = ROPES["longrope"]
    short = rotation(longrope, HEAD_SIZE, NUM_TRAINED).frequencies
    long = rotation(longrope, HEAD_SIZE, NUM_TRAINED + 1).frequencies
    ratio = np.array(longrope.long_factors) / np.array(longrope.short_factors)
    np.testing.assert_allclose(short / long, ratio, rtol=1e-5)


def test_yarn_raises_attention_by_a_tenth_of_the_logarithm() -> None:
    yarn = replace(ROPES["yarn"], factor=math.e)
    assert rotation(yarn, HEAD_SIZE, 256).scale == pytest.approx(1.1)


def test_only_the_rotary_part_of_a_head_turns() -> None:
    assert rotation(Rope(theta=100.0, rotary_dim=16), HEAD_SIZE, 10).rotary_dim == 16
    assert rotation(Rope(theta=100.0), HEAD_SIZE, 10).rotary_dim == HEAD_SIZE


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (Rope(theta=100.0, rotary_dim=128), "128 does not fit a head of 64"),
        (Rope(theta=100.0, rotary_dim=15), "15 does not fit"),
        (Rope(theta=1e-300), "no frequencies"),  # as doubles they would be some
        (
            Rope(theta=9.0, kind=RopeKind.YARN, original_max_position=64, attention_factor=-1e300),
            "no frequencies",
        ),
        (Rope(theta=100.0, kind=RopeKind.YARN, factor=2.0), "yarn needs the context length"),
        (Rope(theta=100.0, kind=RopeKind.FACTORS, frequency_factors=(1.0,)), "1 factors for 32"),
        (Rope(theta=1.0, kind=RopeKind.YARN, original_max_position=64), "yarn .* no frequencies"),
        (
            Rope(theta=9.0, kind=RopeKind.YARN, original_max_position=64, beta_slow=-1.0),
            "yarn .* no frequencies",
        ),
        (
            Rope(theta=9.0, kind=RopeKind.FACTORS, frequency_factors=(0.0,) * 32),
            "factors .* no frequencies",
        ),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(rope: Rope, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        rotation(rope, HEAD_SIZE, 256)

"""A turned model is the same model: in f32 against the oracle, in int8 nearer to it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvota.core.plan import Chunk
from kvota.model.architecture import Architecture
from kvota.model.compiled import KvDtype, compile_model
from kvota.model.graph import build_graph
from kvota.model.sampler import Sampler
from kvota.model.turned import BLOCK, TurnedSource, turned
from kvota.model.weights import WeightFormat, decode, encode
from tests.support.memory_source import MemorySource
from tests.support.reference import reference_logits
from tests.support.tiny_models import FAMILIES, fixed_tokens, tiny_architecture

Floats = npt.NDArray[np.float32]
TOLERANCE = 3e-4  # as in test_families.py


def architecture(family: str, **changes: Any) -> Architecture:
    """One whose products all have whole blocks of inputs."""
    return tiny_architecture(family, **({"mlp_size": 2 * BLOCK} | changes))


def normal(*shape: int) -> Floats:
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def logits(source: MemorySource | TurnedSource, weight_format: WeightFormat) -> Floats:
    """Of every position of one prompt, with an f32 cache."""
    paged = build_graph(source, weight_format)
    tokens = fixed_tokens(20, paged.vocab_size)
    executor = compile_model(paged, kv_dtype=KvDtype.F32, num_threads=1).executor(
        2, Sampler(paged.vocab_size)
    )
    return executor.logits([Chunk(0, tokens, 0, (0,), prompt_logprobs=0, next_token=0)])


def expected(source: MemorySource) -> npt.NDArray[np.float64]:
    weights = {name: weight.values for name, weight in source.weights.items()}
    a = source.architecture
    return reference_logits(a, weights, fixed_tokens(20, a.vocab_size))


def test_turning_keeps_lengths_and_angles_and_undoes_itself() -> None:
    x, y = normal(5, 2 * BLOCK), normal(2 * BLOCK)
    np.testing.assert_allclose(turned(turned(x)), x, atol=1e-5)
    np.testing.assert_allclose(turned(x) @ turned(y), x @ y, atol=1e-4)


def test_one_large_channel_is_spread_evenly_over_its_block_and_no_other() -> None:
    x = np.zeros(3 * BLOCK, np.float32)
    x[BLOCK + 7] = 8.0
    assert np.allclose(np.abs(turned(x))[BLOCK : 2 * BLOCK], 1.0)
    assert np.count_nonzero(turned(x)) == BLOCK


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_turned_model_computes_what_the_model_computes(family: str, tied: bool) -> None:
    source = MemorySource(architecture(family, tied_embeddings=tied))
    got = logits(TurnedSource(source), WeightFormat.F32)
    np.testing.assert_allclose(got, expected(source), rtol=0, atol=TOLERANCE)


def test_biases_turn_with_what_they_are_added_to() -> None:
    every_bias = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    source = MemorySource(architecture("llama", **every_bias))
    got = logits(TurnedSource(source), WeightFormat.F32)
    np.testing.assert_allclose(got, expected(source), rtol=0, atol=TOLERANCE)


def test_inputs_with_a_large_channel_are_rounded_nearer_when_turned() -> None:
    def error(x: Floats) -> float:
        """Of int8 by blocks, against the whole."""
        blocks = x.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
        return float(((np.rint(blocks / scales) * scales - blocks) ** 2).sum() / (x**2).sum())

    inputs = normal(100, 2 * BLOCK)
    inputs[:, 5] *= 8
    assert error(turned(inputs)) < error(inputs) / 3


def test_every_weight_of_a_turned_model_is_read_once() -> None:
    for tied in (False, True):
        source = MemorySource(architecture("qwen2", tied_embeddings=tied))
        build_graph(source, WeightFormat.INT8)
        assert {weight.num_reads for weight in source.weights.values()} == {1}


def test_groups_of_a_turned_model_are_its_blocks() -> None:
    paged = build_graph(MemorySource(architecture("llama")), WeightFormat.INT8)
    assert paged.input_group == BLOCK
    unturned = build_graph(MemorySource(tiny_architecture("llama")), WeightFormat.INT8)
    assert unturned.input_group == 32


def test_large_groups_take_the_closest_of_some_scales() -> None:
    values = normal(200, BLOCK)
    finest = np.abs(values).max(axis=1, keepdims=True) / 127
    with_finest = np.rint(values / finest) * finest
    found = decode(encode(values, WeightFormat.INT8, BLOCK))
    assert ((found - values) ** 2).mean() < 0.9 * ((with_finest - values) ** 2).mean()
    assert np.abs(found - values).max() <= 0.52 * 1.04 * finest.max()

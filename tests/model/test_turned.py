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
from kvota.model.turned import BLOCKS, TurnedSource, block_of, hadamard, turned
from kvota.model.weights import WeightFormat, decode, encode
from tests.support.memory_source import MemorySource
from tests.support.reference import reference_logits
from tests.support.tiny_models import FAMILIES, fixed_tokens, tiny_architecture

Floats = npt.NDArray[np.float32]
TOLERANCE = 3e-4  # as in test_families.py


BLOCK = 64  # of the tiny models, when their MLP has whole ones


def architecture(family: str, **changes: Any) -> Architecture:
    """One whose products all have whole blocks of inputs."""
    return tiny_architecture(family, **({"mlp_size": 2 * BLOCK} | changes))


def turned_source(source: MemorySource) -> TurnedSource:
    block = block_of(source.architecture)
    assert block is not None
    return TurnedSource(source, block)


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


@pytest.mark.parametrize("order", [1, 2, 12, 16, 24, *BLOCKS, 192])
def test_a_hadamard_matrix_is_orthogonal_and_all_its_numbers_are_as_large(order: int) -> None:
    matrix = hadamard(order)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(order), atol=1e-5)
    np.testing.assert_allclose(np.abs(matrix), order**-0.5, rtol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_turning_keeps_lengths_and_angles(block: int) -> None:
    x, y = normal(5, 2 * block), normal(2 * block)
    np.testing.assert_allclose(turned(x, block) @ turned(y, block), x @ y, atol=1e-3)


@pytest.mark.parametrize("block", BLOCKS)
def test_one_large_channel_is_spread_evenly_over_its_block_and_no_other(block: int) -> None:
    x = np.zeros(3 * block, np.float32)
    x[block + 7] = 8.0
    found = turned(x, block)
    assert np.allclose(np.abs(found)[block : 2 * block], 8.0 * block**-0.5)
    assert np.count_nonzero(found) == block


def test_blocks_are_the_largest_that_all_products_have_whole_ones_of() -> None:
    def block(hidden_size: int, num_heads: int, mlp_size: int) -> int | None:
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "mlp_size": mlp_size}
        return block_of(tiny_architecture("llama", **sizes, num_kv_heads=1, head_size=64))

    assert block(4096, 64, 11008) == 128
    assert block(576, 9, 1536) == 96
    assert block(896, 14, 4864) == 128
    assert block(960, 15, 2560) == 64
    assert block(96, 1, 1536) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_turned_model_computes_what_the_model_computes(family: str, tied: bool) -> None:
    source = MemorySource(architecture(family, tied_embeddings=tied))
    got = logits(turned_source(source), WeightFormat.F32)
    np.testing.assert_allclose(got, expected(source), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 96, "num_heads": 4, "head_size": 24, "mlp_size": 192},
        {"hidden_size": 128, "num_heads": 8, "head_size": 16, "mlp_size": 256},
    ],
    ids=["96", "128"],
)
def test_so_it_does_in_other_blocks_and_heads(sizes: dict[str, int]) -> None:
    source = MemorySource(architecture("qwen2", **sizes))
    assert turned_source(source).block == sizes["hidden_size"]
    got = logits(turned_source(source), WeightFormat.F32)
    np.testing.assert_allclose(got, expected(source), rtol=0, atol=TOLERANCE)


def test_biases_turn_with_what_they_are_added_to() -> None:
    every_bias = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    source = MemorySource(architecture("llama", **every_bias))
    got = logits(turned_source(source), WeightFormat.F32)
    np.testing.assert_allclose(got, expected(source), rtol=0, atol=TOLERANCE)


def test_inputs_with_a_large_channel_are_rounded_nearer_when_turned() -> None:
    def error(x: Floats) -> float:
        """Of int8 by blocks, against the whole."""
        blocks = x.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
        return float(((np.rint(blocks / scales) * scales - blocks) ** 2).sum() / (x**2).sum())

    inputs = normal(100, 2 * BLOCK)
    inputs[:, 5] *= 8
    assert error(turned(inputs, BLOCK)) < error(inputs) / 3


def test_a_turned_model_reads_a_weight_twice_at_most_for_its_first_tokens() -> None:
    for tied in (False, True):
        source = MemorySource(architecture("qwen2", tied_embeddings=tied))
        build_graph(source, WeightFormat.INT8)
        reads = {name: weight.num_reads for name, weight in source.weights.items()}
        assert set(reads.values()) == {1, 2}
        assert {count for name, count in reads.items() if "layers.1." in name} == {1}


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

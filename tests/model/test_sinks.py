"""What the first token is worth survives rounding."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvota.model import graph
from kvota.model.graph import build_graph
from kvota.model.sinks import NUM_FIRST, encode_steered, first_inputs
from kvota.model.weights import Matrix, WeightFormat, decode, encode
from tests.support.memory_source import MemorySource
from tests.support.reference import reference_logits
from tests.support.tiny_models import FAMILIES, tiny_architecture

Floats = npt.NDArray[np.float32]
GROUP = 96


def normal(seed: int, *shape: int) -> Floats:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def one_direction() -> Floats:
    """Inputs of first tokens: nearly the same, a few channels far larger than the rest."""
    common = normal(0, 2 * GROUP)
    common[[3, 50, 120]] *= 30
    return common + 0.1 * normal(1, NUM_FIRST, 2 * GROUP)


def missed(matrix: Matrix, values: Floats, inputs: Floats) -> Floats:
    """By how much each output of rounded weights and inputs is off in the mean."""
    grouped = inputs.reshape(len(inputs), -1, GROUP)
    scales = np.abs(grouped).max(axis=-1, keepdims=True) / 127
    rounded = (np.rint(grouped / scales) * scales).reshape(inputs.shape)
    outputs: Floats = rounded @ decode(matrix).T - inputs @ values.T
    return np.asarray(np.abs(outputs.mean(axis=0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_first_inputs_are_those_of_contexts_of_one_token(family: str) -> None:
    """Against the oracle, cut off before the layer, with a head that shows what would go in."""
    a = tiny_architecture(family, num_layers=3, tied_embeddings=False)
    source = MemorySource(a)
    weights = {name: weight.values for name, weight in source.weights.items()}
    weights["model.norm.weight"] = np.ones(a.hidden_size, np.float32)
    weights["lm_head.weight"] = np.eye(a.vocab_size, a.hidden_size, dtype=np.float32)
    ids = np.linspace(0, a.vocab_size - 1, NUM_FIRST).astype(int)
    layers = list(first_inputs(source))
    assert len(layers) == a.num_layers
    for layer, found in enumerate(layers):
        cut = replace(a, num_layers=layer)
        for own, token in zip(found, ids, strict=True):
            [logits] = reference_logits(cut, weights, [int(token)])
            np.testing.assert_allclose(own, logits[: a.hidden_size], atol=1e-4)


def test_steered_codes_give_the_first_tokens_what_unrounded_weights_give() -> None:
    values, inputs = normal(2, 40, 2 * GROUP), one_direction()
    plain = encode(values, WeightFormat.INT8, GROUP)
    steered = encode_steered(values, GROUP, inputs)
    before, after = (missed(matrix, values, inputs) for matrix in (plain, steered))
    assert after.mean() < before.mean() / 5
    assert (after <= before + 1e-5).all()


def test_steering_moves_few_codes_and_each_to_its_other_neighbour() -> None:
    values, inputs = normal(2, 40, 2 * GROUP), one_direction()
    plain = encode(values, WeightFormat.INT8, GROUP)
    steered = encode_steered(values, GROUP, inputs)
    assert plain.scales is not None
    assert steered.scales is not None
    np.testing.assert_array_equal(plain.scales, steered.scales)
    codes = steered.codes.astype(np.float32)
    off = np.abs(values.reshape(codes.shape) / steered.scales - codes)
    assert off.max() <= 1 + 1e-3
    assert 0 < (plain.codes != steered.codes).mean() < 0.1
    errors = [float(((decode(m) - values) ** 2).sum()) for m in (plain, steered)]
    assert errors[1] < 1.4 * errors[0]


def test_no_code_leaves_int8() -> None:
    values, inputs = normal(3, 200, 2 * GROUP), one_direction()
    codes = encode_steered(values, GROUP, 100 * inputs).codes.astype(int)
    assert np.abs(codes).max() == 127


def test_values_of_nothing_and_inputs_of_nothing_stay_so() -> None:
    nothing = np.zeros((8, 2 * GROUP), np.float32)
    assert not decode(encode_steered(nothing, GROUP, one_direction())).any()
    values = normal(4, 8, 2 * GROUP)
    plain = encode(values, WeightFormat.INT8, GROUP)
    steered = encode_steered(values, GROUP, np.zeros((3, 2 * GROUP), np.float32))
    np.testing.assert_array_equal(plain.codes, steered.codes)


def test_the_values_of_every_layer_of_a_turned_model_are_steered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []

    def watched(values: Floats, group: int, inputs: Floats) -> Matrix:
        shapes.append((values.shape, group, inputs.shape))
        return encode_steered(values, group, inputs)

    monkeypatch.setattr(graph, "encode_steered", watched)
    a = tiny_architecture("llama", mlp_size=128)
    build_graph(MemorySource(a), WeightFormat.INT8)
    values = (a.num_kv_heads * a.head_size, a.hidden_size)
    assert shapes == [(values, 64, (NUM_FIRST, a.hidden_size))] * a.num_layers

"""What storage keeps of a matrix, and that the kernels multiply with exactly that."""

import gc
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvota.model.levels import GROUP, Levels
from kvota.model.weights import (
    Matrix,
    WeightFormat,
    decode,
    encode,
    encode_levels,
    group_size,
    product,
    stacked,
)

Floats = npt.NDArray[np.float32]
STORED = [WeightFormat.F32, WeightFormat.F16, WeightFormat.INT8, WeightFormat.INT4]


def normal(num_outputs: int, num_inputs: int, seed: int = 0) -> Floats:
    chance = np.random.default_rng(seed)
    return chance.standard_normal((num_outputs, num_inputs)).astype(np.float32)


def multiplied(matrix: Matrix, x: Floats) -> Floats:
    """x · matrixᵀ by OpenVINO's kernels, with inputs left exact. The matrix is forgotten first."""
    vectors = ops.parameter([-1, x.shape[1]], ov.Type.f32)
    model = ov.Model([ops.result(product(vectors, matrix))], [vectors])
    del matrix
    gc.collect()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    result: Floats = ov.Core().compile_model(model, "CPU", exact)(x)[0]
    return result


def levels_as_in_q4_1() -> tuple[Floats, Floats]:
    """A matrix whose groups each have 16 even levels, and the steps between them."""
    chance = np.random.default_rng(5)
    step = chance.uniform(0.01, 0.02, (90, 3, 1)).astype(np.float16).astype(np.float32)
    least = -step * chance.uniform(3, 12, step.shape).astype(np.float32)
    levels = chance.integers(0, 16, (90, 3, GROUP)).astype(np.float32)
    levels[..., :2] = 0, 15  # both ends are in use, as GGUF's writer leaves it
    return (levels * step + least).reshape(90, -1), step


def random_levels(num_outputs: int, num_inputs: int) -> Levels:
    """Levels whose steps f16 can hold, and whose zero lies anywhere among them."""
    chance = np.random.default_rng(6)
    groups = (num_outputs, num_inputs // GROUP)
    steps = chance.uniform(0.01, 0.02, (*groups, 1)).astype(np.float16).astype(np.float32)
    least = -steps * chance.uniform(0, 15, steps.shape).astype(np.float32)
    return Levels(chance.integers(0, 16, (*groups, GROUP), np.uint8), steps, least)


def at_finest_scale(values: Floats) -> Floats:
    """Each group rounded to multiples of 1/127 of its largest number, in f16."""
    groups = values.reshape(-1, group_size(values.shape[1])).astype(np.float64)
    rounded = []
    for numbers in groups:
        exact = np.abs(numbers).max() / 127.0
        scale = np.float16(exact)
        scale = np.nextafter(scale, np.float16(np.inf)) if scale < exact else scale
        rounded.append(np.rint(numbers / scale) * scale if scale else 0.0 * numbers)
    return np.array(rounded, np.float32).reshape(values.shape)


def rounding_error(values: Floats, rounded: Floats) -> Floats:
    """Sum of squared errors of each group."""
    missed = (rounded - values).reshape(-1, group_size(values.shape[1]))
    return np.asarray((missed**2).sum(axis=-1), np.float32)


class TestTheKernelsMultiplyWithTheDecodedNumbers:
    @pytest.mark.parametrize("weight_format", STORED)
    @pytest.mark.parametrize("num_inputs", [64, 96, 40])  # two groups, three, none
    @pytest.mark.parametrize("num_rows", [1, 3, 40])
    def test_in_every_format(
        self, weight_format: WeightFormat, num_inputs: int, num_rows: int
    ) -> None:
        values = normal(33, num_inputs)
        matrix = encode(values, weight_format)
        expected = normal(num_rows, num_inputs, seed=1) @ decode(matrix).T
        got = multiplied(encode(values, weight_format), normal(num_rows, num_inputs, seed=1))
        np.testing.assert_allclose(got, expected, atol=1e-4)

    @pytest.mark.parametrize("weight_format", STORED)
    def test_stacked(self, weight_format: WeightFormat) -> None:
        parts = [encode(normal(n, 64, seed=n), weight_format) for n in (3, 8, 1)]
        expected = normal(5, 64) @ np.concatenate([decode(part) for part in parts]).T
        np.testing.assert_allclose(multiplied(stacked(parts), normal(5, 64)), expected, atol=1e-4)


class TestRounding:
    finite = arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([8, 32, 64])),
        elements=st.floats(-1000, 1000, width=32),
    )

    @given(finite)
    @settings(max_examples=60, deadline=None)
    def test_int8_is_within_half_a_step_of_every_number(self, values: Floats) -> None:
        matrix = encode(values, WeightFormat.INT8)
        assert matrix.scales is not None
        step = np.repeat(matrix.scales.astype(np.float32), group_size(values.shape[1]), axis=2)
        error = np.abs(decode(matrix) - values).reshape(step.shape)
        tiny = np.float32(2.0**-18)  # below f16's range a scale has few digits, or is 0
        assert (error <= step * 0.5001 + tiny).all()

    @given(finite)
    @settings(max_examples=60, deadline=None)
    def test_int4_is_within_little_more_than_half_a_step(self, values: Floats) -> None:
        matrix = encode(values, WeightFormat.INT4)
        assert matrix.scales is not None
        step = np.repeat(matrix.scales.astype(np.float32), group_size(values.shape[1]), axis=2)
        error = np.abs(decode(matrix) - values).reshape(step.shape)
        largest_step = step.max(
            axis=(1, 2), keepdims=True
        )  # all groups here share the rest's scale
        assert (error <= step * 0.51 + largest_step / 508 + 2.0**-18).all()

    def test_exact_formats_change_nothing_or_round_to_half(self) -> None:
        values = normal(4, 32)
        np.testing.assert_array_equal(decode(encode(values, WeightFormat.F32)), values)
        halves = values.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(decode(encode(values, WeightFormat.F16)), halves)

    @given(finite)
    @settings(max_examples=60, deadline=None)
    def test_int8_is_never_further_than_with_the_finest_scale(self, values: Floats) -> None:
        error = rounding_error(values, decode(encode(values, WeightFormat.INT8)))
        finest = rounding_error(values, at_finest_scale(values))
        assert (error <= finest * 1.0001 + 2.0**-36).all()

    @pytest.mark.parametrize("num_inputs", [64, 1056])  # 1056: a second group of rests
    def test_levels_are_kept_wherever_zero_lies(self, num_inputs: int) -> None:
        levels = random_levels(9, num_inputs)
        kept = decode(encode_levels(levels)).reshape(levels.levels.shape)
        error = np.abs(kept - levels.values().reshape(kept.shape))
        assert (error <= 0.012 * levels.steps.max()).all()

    def test_levels_around_a_whole_zero_point_are_kept_exactly_and_need_no_rest(self) -> None:
        levels = random_levels(9, 64)
        whole = replace(levels, least=-8 * levels.steps)
        matrix = encode_levels(whole)
        assert matrix.rest is None
        np.testing.assert_array_equal(decode(matrix), whole.values())

    def test_a_part_without_rest_can_be_stacked_on_one_with(self) -> None:
        levels = random_levels(9, 96)
        parts = [encode_levels(levels), encode_levels(replace(levels, least=-8 * levels.steps))]
        both = stacked(parts)
        np.testing.assert_array_equal(decode(both), np.concatenate([decode(p) for p in parts]))
        x = normal(3, 96)
        np.testing.assert_allclose(multiplied(both, x), x @ decode(both).T, atol=1e-4)

    def test_a_matrix_of_q4_1_keeps_its_numbers_in_int4(self) -> None:
        values, step = levels_as_in_q4_1()
        error = np.abs(decode(encode(values, WeightFormat.INT4)) - values)
        assert error.max() < 0.005 * step.max()

    def test_int8_finds_the_levels_of_a_matrix_of_q4_1(self) -> None:
        values, _ = levels_as_in_q4_1()
        error = rounding_error(values, decode(encode(values, WeightFormat.INT8)))
        assert error.sum() < 0.25 * rounding_error(values, at_finest_scale(values)).sum()

    def test_zeros_stay_zeros(self) -> None:
        zeros = np.zeros((2, 64), np.float32)
        for weight_format in STORED:
            np.testing.assert_array_equal(decode(encode(zeros, weight_format)), zeros)

    def test_an_outlier_costs_only_its_own_group_precision(self) -> None:
        values = normal(1, 64)
        values[0, 0] = 1000.0
        error = np.abs(decode(encode(values, WeightFormat.INT8)) - values)[0]
        assert error[GROUP:].max() < 0.02 < error[:GROUP].max()


def test_groups_are_32_where_that_divides_and_whole_rows_elsewhere() -> None:
    assert [group_size(n) for n in (32, 64, 576, 40)] == [32, 32, 32, 40]


def test_sizes_are_what_the_formats_promise() -> None:
    sizes = {f: encode(normal(8, 1024), f).num_bytes / (8 * 1024) for f in STORED}
    assert sizes[WeightFormat.F32] == 4.0
    assert sizes[WeightFormat.F16] == 2.0
    assert sizes[WeightFormat.INT8] == 1.0 + 2 / GROUP
    rest = 1.0 + 2 / GROUP
    assert sizes[WeightFormat.INT4] == 0.5 + (2 + 1 + rest) / GROUP


def test_a_large_matrix_is_encoded_in_slices_that_do_not_show() -> None:
    values = normal(5000, 1024)  # more than one slice
    part = encode(values[4500:4600], WeightFormat.INT8)
    whole = encode(values, WeightFormat.INT8)
    np.testing.assert_array_equal(whole.codes[4500:4600], part.codes)

"""Which storage `auto` chooses for a matrix."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvota.model.architecture import Architecture, Weight
from kvota.model.levels import Levels, fitted
from kvota.model.precision import (
    KEPT_SIDE_MIN,
    format_of,
    input_group,
    turned_block,
    vocabulary_format,
)
from kvota.model.weights import WeightFormat
from tests.support.tiny_models import tiny_architecture

LARGE = KEPT_SIDE_MIN


@dataclass
class Stored:
    """A weight that a file holds in 16 levels, or not."""

    shape: tuple[int, ...]
    has_levels: bool = True
    name: str = "a"
    stored_as: str = "Q4_1"

    def read(self) -> npt.NDArray[np.float32]:
        return np.zeros(self.shape, np.float32)

    def read_levels(self) -> Levels:
        return fitted(self.read())


@dataclass
class Plain:
    """A weight of a file that has no types of 16 levels."""

    shape: tuple[int, ...]
    name: str = "a"
    stored_as: str = "F16"

    def read(self) -> npt.NDArray[np.float32]:
        return np.zeros(self.shape, np.float32)


def test_auto_keeps_large_matrices_of_4_bits_and_rounds_all_others_to_int8() -> None:
    auto = WeightFormat.AUTO
    assert format_of(auto, [Stored((LARGE, LARGE))]) is WeightFormat.INT4
    assert format_of(auto, [Stored((LARGE - 1, LARGE))]) is WeightFormat.INT8
    assert format_of(auto, [Stored((LARGE, LARGE - 32))]) is WeightFormat.INT8
    assert format_of(auto, [Stored((LARGE, LARGE), has_levels=False)]) is WeightFormat.INT8
    assert format_of(auto, [Plain((LARGE, LARGE))]) is WeightFormat.INT8


def test_a_matrix_of_several_parts_is_as_large_as_all_and_in_4_bits_if_all_are() -> None:
    half = Stored((LARGE // 2, LARGE))
    assert format_of(WeightFormat.AUTO, [half, half]) is WeightFormat.INT4
    assert format_of(WeightFormat.AUTO, [half, Plain((LARGE, LARGE))]) is WeightFormat.INT8


@pytest.mark.parametrize("asked", [one for one in WeightFormat if one is not WeightFormat.AUTO])
def test_what_an_operator_asks_for_is_done(asked: WeightFormat) -> None:
    assert format_of(asked, [Stored((8, 64))]) is asked


def test_a_vocabulary_is_never_in_4_bits() -> None:
    assert {asked: vocabulary_format(asked) for asked in WeightFormat} == {
        WeightFormat.AUTO: WeightFormat.INT8,
        WeightFormat.F32: WeightFormat.F32,
        WeightFormat.F16: WeightFormat.F16,
        WeightFormat.INT8: WeightFormat.INT8,
        WeightFormat.INT4: WeightFormat.INT8,
    }


def test_inputs_are_rounded_where_weights_are_codes() -> None:
    for turned_by, group in ((None, 32), (96, 96)):
        exact = {input_group(asked, turned_by) for asked in (WeightFormat.F32, WeightFormat.F16)}
        assert exact == {0}
        assert input_group(WeightFormat.INT8, turned_by) == group


@dataclass
class Model:
    """No more of a source than is asked for."""

    architecture: Architecture
    weights: dict[str, Weight]
    origin: str = "memory"


def model(weight: Stored | Plain, **changes: int) -> Model:
    sizes = {"hidden_size": 128, "num_heads": 8, "mlp_size": 256} | changes
    return Model(tiny_architecture("llama", **sizes), {"a": weight})


def test_a_model_is_turned_where_all_of_it_will_be_int8() -> None:
    small, large = Stored((256, 128)), Stored((LARGE, LARGE))
    auto, int8 = WeightFormat.AUTO, WeightFormat.INT8
    assert turned_block(auto, model(small)) == 128
    assert turned_block(auto, model(large, hidden_size=LARGE)) is None
    assert turned_block(auto, model(Plain((LARGE, LARGE)), hidden_size=LARGE)) == 128
    assert turned_block(int8, model(large, hidden_size=LARGE)) == 128
    for asked in (WeightFormat.F32, WeightFormat.F16, WeightFormat.INT4):
        assert turned_block(asked, model(small)) is None


def test_a_model_with_half_a_block_of_inputs_anywhere_is_not_turned() -> None:
    for part in ({"hidden_size": 96}, {"mlp_size": 96}, {"num_heads": 6}):
        assert turned_block(WeightFormat.AUTO, model(Plain((8, 8)), **part)) is None

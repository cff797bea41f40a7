"""Levels taken from a file's blocks, against the numbers that the gguf package makes of them."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize

from kvota.model.gguf_levels import has_levels, levels_of

KEPT = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q4_K")]
LEADING_HALVES = {"Q4_0": 1, "Q4_1": 2, "Q4_K": 2}


def random_rows(
    kind: gguf.GGMLQuantizationType, num_rows: int, num_blocks: int
) -> npt.NDArray[np.uint8]:
    """Blocks of random bytes, whose scales are positive, negative and zero."""
    chance = np.random.default_rng(4)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = chance.integers(0, 256, (num_rows * num_blocks, block_bytes), np.uint8)
    num_halves = LEADING_HALVES[kind.name]
    scales = chance.uniform(-0.02, 0.02, (len(blocks), num_halves)).astype(np.float16)
    scales[0] = 0.0
    blocks[:, : 2 * num_halves] = scales.view(np.uint8)
    return blocks.reshape(num_rows, num_blocks * block_bytes)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_the_levels_are_the_numbers_of_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    rows = random_rows(kind, 6, 3)
    levels = levels_of(rows, kind)
    expected = dequantize(rows, kind)
    assert levels.shape == expected.shape
    assert levels.levels.max() == 15
    assert (levels.steps >= 0).all()
    np.testing.assert_allclose(levels.values(), expected, rtol=1e-5, atol=1e-6)


def test_types_of_other_widths_and_of_uneven_levels_have_none() -> None:
    known = {kind.name for kind in gguf.GGMLQuantizationType if has_levels(kind)}
    assert known == {"Q4_0", "Q4_1", "Q4_K"}

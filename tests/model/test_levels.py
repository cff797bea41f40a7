"""Sixteen levels found in numbers that have more."""

import numpy as np
import pytest

from kvota.model import levels as levels_module
from kvota.model.levels import GROUP, LEVEL_MAX, Levels, fitted


def test_the_numbers_are_steps_from_the_least() -> None:
    levels = np.arange(64, dtype=np.uint8).reshape(1, 2, GROUP) % 16
    steps = np.array([[[0.5], [2.0]]], np.float32)
    least = np.array([[[-1.0], [3.0]]], np.float32)
    values = Levels(levels, steps, least).values()
    assert values.shape == (1, 64)
    assert values[0, :3].tolist() == [-1.0, -0.5, 0.0]
    assert values[0, 32:35].tolist() == [3.0, 5.0, 7.0]


def test_fitted_levels_span_a_group_and_are_the_nearest() -> None:
    values = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    found = fitted(values)
    every_level = found.least + found.steps * np.arange(LEVEL_MAX + 1, dtype=np.float32)
    distances = np.abs(values.reshape(5, 3, GROUP, 1) - every_level[:, :, None, :])
    missed = np.abs(found.values() - values).reshape(5, 3, GROUP)
    np.testing.assert_allclose(missed, distances.min(axis=-1), atol=1e-6)
    np.testing.assert_array_equal(found.least[..., 0], values.reshape(5, 3, GROUP).min(axis=-1))


def test_zero_is_among_the_levels_of_numbers_of_one_sign() -> None:
    ones = np.ones((1, GROUP), np.float32)
    assert fitted(ones).least.item() == 0.0
    below = fitted(-ones)
    assert below.least.item() == -1.0
    assert below.least.item() + LEVEL_MAX * below.steps.item() == pytest.approx(0.0, abs=1e-3)


def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).standard_normal((7, 64)).astype(np.float32)
    whole = fitted(values).values()
    monkeypatch.setattr(levels_module, "_SLICE_ELEMENTS", 130)  # two rows at a time
    np.testing.assert_array_equal(fitted(values).values(), whole)

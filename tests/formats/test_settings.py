"""What a file says is of the type that is wanted, or the message says where it is not."""

from collections.abc import Callable
from typing import Any

import pytest

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings

ENDLESS = 10**400  # a legal number of JSON that no float holds
READERS: dict[str, Callable[[Settings], Any]] = {
    "whole": lambda one: one.whole("x"),
    "real": lambda one: one.real("x"),
    "positive": lambda one: one.positive("x"),
    "reals": lambda one: one.reals("x"),
    "flag": lambda one: one.flag("x", False),
}


@pytest.mark.parametrize(
    ("reader", "value", "read"),
    [
        ("whole", 3, 3),
        ("whole", [4, 4], 4),
        ("whole", -(2**999), -(2**999)),
        ("real", 2, 2.0),
        ("positive", 0.5, 0.5),
        ("reals", [1, 2.5], (1.0, 2.5)),
        ("flag", True, True),
        ("flag", None, False),
    ],
)
def test_what_fits_is_read(reader: str, value: Any, read: Any) -> None:
    assert READERS[reader](Settings({"x": value}, "config.json")) == read


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        *[("whole", wrong) for wrong in (None, "3", 1.5, True, [], [1, 2], ENDLESS, -ENDLESS)],
        *[("real", wrong) for wrong in (None, "3", True, float("nan"), float("inf"), ENDLESS)],
        *[("positive", wrong) for wrong in (0, -1.0, ENDLESS)],
        *[("reals", wrong) for wrong in (None, [], 1.0, ["a"], [1.0, None], [ENDLESS])],
        *[("flag", wrong) for wrong in (0, "true", [True])],
    ],
)
def test_what_does_not_is_named_with_its_file_in_a_short_sentence(reader: str, value: Any) -> None:
    settings = Settings({"m.x": value}, "config.json", prefix="m.")
    with pytest.raises(ModelError, match=r"^config\.json: m\.x is .* it must be ") as caught:
        READERS[reader](settings)
    assert len(caught.value.message) < 200


def test_a_place_is_named_in_messages_only() -> None:
    settings = Settings({"factor": "x"}, "config.json", where="rope_scaling: ")
    with pytest.raises(ModelError, match=r"^config\.json: rope_scaling: factor is 'x'"):
        settings.real("factor")

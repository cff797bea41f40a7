"""Typed access to what a model file says about itself: the keys of a GGUF header or config.json."""

import math
from collections.abc import Mapping
from typing import Any, Final

from kvota.core.errors import ModelError

_WHOLE_MAX: Final = (
    2**1000
)  # JSON bounds no number, and what no float holds cannot be computed with


class Settings:
    """Named values of unknown type. Every access checks the type and names file and key on error.

    `prefix` goes before each name, as GGUF's "llama." does; `where` goes before it in messages
    only. A value of null counts as missing.
    """

    def __init__(
        self, values: Mapping[str, Any], origin: str, *, prefix: str = "", where: str = ""
    ) -> None:
        self._values = values
        self._prefix = prefix
        self._where = where
        self.origin = origin

    def get(self, name: str) -> Any:
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        """True when the key is there, be it null."""
        return self._prefix + name in self._values

    def whole(self, name: str, default: int | None = None) -> int:
        """An integer that a float can hold. A list, one entry a layer, is accepted when all entries
        are the same.
        """
        value = self.get(name)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, list):
            raise self.wrong(name, "one value, the same on every layer")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _WHOLE_MAX:
            raise self.wrong(name, "a whole number")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_number(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.real(name, default)
        if value <= 0:
            raise self.wrong(name, "a number above 0")
        return value

    def optional_real(self, name: str) -> float | None:
        return None if self.get(name) is None else self.real(name)

    def reals(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, not empty."""
        values = self.get(name)
        if not isinstance(values, list) or not values or not all(map(_is_number, values)):
            raise self.wrong(name, "a list of numbers")
        return tuple(float(value) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a key whose value is not what it must be."""
        value = self.get(name)
        shown = "missing" if value is None else repr(value)[:100]
        key = f"{self._where}{self._prefix}{name}"
        return ModelError(f"{self.origin}: {key} is {shown}; it must be {wanted}.")


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _WHOLE_MAX
    return isinstance(value, float) and math.isfinite(value)

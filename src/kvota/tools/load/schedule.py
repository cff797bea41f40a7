"""When requests are due, and how long they are. Pure: the same seed gives the same load.

Arrivals are a Poisson process given its number of arrivals, which is then a set of independent
uniform moments. With the number fixed, what two runs at one rate differ by is how the arrivals
cluster and not how many happened to come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvota.core.errors import KvotaError


class BadLengths(KvotaError):
    """Lengths that cannot be read, or make no sense."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts from `least` to `most`, each equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise BadLengths(f"{self}: lengths start at 1 and do not fall, for example 32-192.")

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From "128" or "32-192". Raises BadLengths."""
        least, dash, most = text.partition("-")
        try:
            return cls(int(least), int(most) if dash else int(least))
        except ValueError:
            raise BadLengths(f"{text!r} is no length in tokens; write 128 or 32-192.") from None

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, chance: Random) -> int:
        return chance.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of one kind of request, and the lane its results are grouped under."""

    prompt: Lengths
    output: Lengths
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Due:
    """A request without its text."""

    scheduled_s: float
    prompt_tokens: int
    output_tokens: int
    lane: str = ""


def open_loop(
    shape: Shape, rate_rps: float, duration_s: float, seed: object, *, is_even: bool = False
) -> list[Due]:
    """All requests of `duration_s` seconds, in order of time; at least one.

    `is_even`: at equal distances instead of at random.
    """
    chance = Random(repr(seed))
    num = max(1, round(rate_rps * duration_s))
    if is_even:
        moments = [number / rate_rps for number in range(num)]
    else:
        moments = sorted(chance.uniform(0, duration_s) for _ in range(num))
    return [_due(shape, at_s, chance) for at_s in moments]


def one_by_one(shape: Shape, seed: object) -> Iterator[Due]:
    """Requests without end, each due at once: whoever sends them decides when."""
    chance = Random(repr(seed))
    while True:
        yield _due(shape, 0.0, chance)


def _due(shape: Shape, at_s: float, chance: Random) -> Due:
    return Due(at_s, shape.prompt.draw(chance), shape.output.draw(chance), shape.lane)

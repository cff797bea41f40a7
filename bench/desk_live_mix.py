"""The team mix, as requests to be sent at set moments.

92 % short: prompt 32–192 tokens, output 16–64. 8 % long: prompt 1,500–3,000, output 64–128. Lengths
are uniform. Arrivals are a Poisson process given its number of arrivals, which is then a set of
independent uniform moments: with the number and the share of long ones fixed at their means, what
two runs differ by is the rate and not how many happened to come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

LONG_SHARE = 0.08
SHORT_PROMPT, SHORT_OUTPUT = (32, 192), (16, 64)
LONG_PROMPT, LONG_OUTPUT = (1_500, 3_000), (64, 128)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it is due, in seconds from the start, and its exact lengths in tokens."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    is_long: bool = False


def team_mix(rate_rps: float, duration_s: float, seed: int) -> list[Ask]:
    """All requests of `duration_s` seconds at `rate_rps`, in the order of time.

    The same seed gives the same requests, whenever it is called.
    """
    chance = Random(seed)
    num_asks = round(rate_rps * duration_s)
    num_long = round(LONG_SHARE * num_asks)
    moments = sorted(chance.uniform(0, duration_s) for _ in range(num_asks))
    long_ones = set(chance.sample(range(num_asks), num_long))
    return [_ask(chance, at_s, number in long_ones) for number, at_s in enumerate(moments)]


def short_ones(rate_rps: float, duration_s: float, seed: int) -> list[Ask]:
    """The short requests of the mix alone, at `rate_rps`."""
    chance = Random(seed)
    num_asks = round(rate_rps * duration_s)
    moments = sorted(chance.uniform(0, duration_s) for _ in range(num_asks))
    return [_ask(chance, at_s, is_long=False) for at_s in moments]


def fresh_prompts(asks: Iterable[Ask], vocab_size: int, seed: object) -> list[Sequence[int]]:
    """A prompt of the right length for each, made of ordinary ids; no two begin alike."""
    chance = Random(repr(seed))
    ordinary = range(300, vocab_size)  # ids below are special in the default model
    return [chance.choices(ordinary, k=ask.prompt_tokens) for ask in asks]


def _ask(chance: Random, at_s: float, is_long: bool) -> Ask:
    prompt, output = (LONG_PROMPT, LONG_OUTPUT) if is_long else (SHORT_PROMPT, SHORT_OUTPUT)
    return Ask(at_s, chance.randint(*prompt), chance.randint(*output), is_long)

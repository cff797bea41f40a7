"""One request of a workload, before anything is known of its fate.

A trace holds no text, so prompts are made up: equal block ids become equal token ids, everything
else is fresh, and no two requests share what the trace does not say they share.

    prefix ids   [ 0 ][ 7 ][ 8 ]           prefix_block tokens each, the last one perhaps cut
    prompt       [ shared with all who say 0, 7, 8 ][ fresh: this request's own ]
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvota.core.request import Band

MOONCAKE_BLOCK = 512
_FRESH = 1 << 50  # token ids from here on belong to one request alone
_FRESH_SPAN = 1 << 24  # more than any prompt has


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Who asks how much, and when. Seconds count from the start of the workload."""

    at_s: float
    prompt_tokens: int
    output_tokens: int  # what the model will say, known to the simulator alone
    max_tokens: int  # what the client allows, known to the server
    n: int = 1  # choices of one prompt, each with its own output
    tenant: str = "default"
    session: str | None = None  # the conversation it belongs to, where the trace says so
    band: Band = Band.INTERACTIVE
    first_token_s: float | None = None  # the client says it waits no longer for the first token
    prefix: tuple[int, ...] = ()  # ids of the leading blocks; equal ids stand for equal tokens
    prefix_block: int = MOONCAKE_BLOCK


def prompt_of(arrival: Arrival, number: int) -> list[int]:
    """Token ids of the prompt. `number` tells this request's fresh tokens from all others'."""
    size = arrival.prefix_block
    tokens: list[int] = []
    for block in arrival.prefix:
        tokens.extend(range(1 + block * size, 1 + (block + 1) * size))
    del tokens[arrival.prompt_tokens :]
    first = _FRESH + number * _FRESH_SPAN
    tokens.extend(range(first, first + arrival.prompt_tokens - len(tokens)))
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a workload is fitted to another machine. Part of every result.

    `time` stretches the clock: 2.0 halves the rate and keeps the shape of the bursts. `length`
    divides all lengths, and the prefix blocks with them, so that their number stays.
    """

    time: float = 1.0
    length: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.time < math.inf or self.length < 1:
            raise ValueError(f"time must be positive and finite, and length at least 1, got {self}")

    def apply(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """Raises ValueError when a prefix block cannot be divided evenly."""
        return (self._scaled(arrival) for arrival in arrivals)

    def _scaled(self, arrival: Arrival) -> Arrival:
        if arrival.prefix and arrival.prefix_block % self.length:
            raise ValueError(
                f"length scaling {self.length} does not divide the prefix block of "
                f"{arrival.prefix_block} tokens"
            )
        return replace(
            arrival,
            at_s=arrival.at_s * self.time,
            prompt_tokens=-(-arrival.prompt_tokens // self.length),
            output_tokens=-(-arrival.output_tokens // self.length),
            max_tokens=-(-arrival.max_tokens // self.length),
            prefix_block=max(1, arrival.prefix_block // self.length),
        )


def split(arrivals: list[Arrival], share: float) -> tuple[list[Arrival], list[Arrival]]:
    """The first `share` of the requests, to calibrate on, and the rest, to judge.

    The judged part starts at second 0 again.
    """
    cut = int(len(arrivals) * share)
    judged = arrivals[cut:]
    start_s = judged[0].at_s if judged else 0.0
    return arrivals[:cut], [replace(one, at_s=one.at_s - start_s) for one in judged]

"""The figures that describe traffic, as data. How they are computed: `shape.py`, `prefixes.py`.

Lengths are tokens. IDC is variance / mean of the arrivals in a window, and gap_cv the standard
deviation / mean of the times between arrivals: both are 1 for a Poisson process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthFigures:
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Burstiness:
    window_s: int
    idc: float
    peak: float  # the fullest window over the mean one


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prefix cache of any size could save."""

    block_tokens: int
    num_blocks: int  # looked up
    num_hits: int
    token_share: float  # of all prompt tokens
    num_distinct: int
    once_share: float  # of the distinct blocks
    sharing_requests: float  # share of requests that hit at least one block
    again_after_s: tuple[float, float, float]  # p50, p90, p99 of the time since a block's last use

    @property
    def hit_share(self) -> float:
        return self.num_hits / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of requests, one by one."""

    num_requests: int
    span_s: float  # first to last arrival
    rate_rps: float
    gap_cv: float
    bursts: Sequence[Burstiness]
    prompt: LengthFigures
    output: LengthFigures
    prompt_to_output: float
    correlation: float  # of prompt and output lengths
    long_requests: float  # share of requests with prompts over 4,096 tokens
    long_tokens: float  # share of prompt tokens that they hold
    num_tenants: int
    top_tenants: Mapping[int, float]  # share of requests of the busiest so many
    reuse: Reuse | None  # None: the file says nothing of prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationShape:
    """Of clients that are described by distributions: exact, and not of a draw."""

    num_clients: int
    hours: float  # in which some client is busy
    rate_rps: float
    lowest_rps: float  # of a window
    highest_rps: float
    prompt: LengthFigures  # weighted by rates
    output: LengthFigures
    prompt_to_output: float
    top_clients: Mapping[int, float]

"""Made-up workloads with known answers, for overload, fairness and small random worlds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.sim.records import RequestRecord
from kvota.traffic.arrival import Arrival

# Share of requests of the busiest 1, 5, 10, 25, 50 and all 73 clients of ServeGen's deepseek-r1.
SERVEGEN_SHARES = ((1, 0.286), (5, 0.525), (10, 0.677), (25, 0.901), (50, 0.991), (73, 1.0))


def team_mix(
    rng: Random, *, rate_rps: float, duration_s: float, says_patience: bool = False
) -> Iterator[Arrival]:
    """Poisson arrivals of a team at work: 92 % short requests, 8 % long ones, all fresh text.

    Short: prompt 32–192, output 16–64. Long: prompt 1,500–3,000, output 64–128. Uniform, and
    the output length is what the client asks for. With `says_patience` each request carries how
    long it waits for its first token: 3 s when short, 20 s when long.
    """
    for at_s in _poisson(rng, rate_rps, duration_s):
        is_long = rng.random() < 0.08
        prompt = rng.randint(1500, 3000) if is_long else rng.randint(32, 192)
        output = rng.randint(64, 128) if is_long else rng.randint(16, 64)
        yield Arrival(
            at_s=at_s, prompt_tokens=prompt, output_tokens=output, max_tokens=output,
            tenant="long" if is_long else "short",
            first_token_s=(20.0 if is_long else 3.0) if says_patience else None,
        )  # fmt: skip


def is_good_for_team(record: RequestRecord) -> bool:
    """Short: TTFT ≤ 3 s and TPOT ≤ 0.25 s. Long: TTFT ≤ 20 s."""
    if record.outcome is not Outcome.COMPLETED or record.ttft_s is None:
        return False
    if record.arrival.tenant == "long":
        return record.ttft_s <= 20.0
    return record.ttft_s <= 3.0 and record.tpot_s <= 0.25


def flood(
    rng: Random,
    *,
    tenant: str,
    rate_rps: float,
    duration_s: float,
    prompt: tuple[int, int],
    output: tuple[int, int],
    max_tokens: int,
    band: Band = Band.INTERACTIVE,
) -> Iterator[Arrival]:
    """One tenant's Poisson stream; lengths uniform between the given bounds."""
    for at_s in _poisson(rng, rate_rps, duration_s):
        yield Arrival(
            at_s=at_s, prompt_tokens=rng.randint(*prompt), output_tokens=rng.randint(*output),
            max_tokens=max_tokens, tenant=tenant, band=band,
        )  # fmt: skip


def merged(*streams: Iterator[Arrival]) -> list[Arrival]:
    """All streams in the order of time."""
    return sorted((one for stream in streams for one in stream), key=lambda one: one.at_s)


def with_tenants(arrivals: Sequence[Arrival], rng: Random) -> list[Arrival]:
    """Give a trace without tenants 73 of them, as unequal as ServeGen's."""
    names, weights = [], []
    below, share_below = 0, 0.0
    for clients, share in SERVEGEN_SHARES:
        each = (share - share_below) / (clients - below)
        names += [f"tenant-{number}" for number in range(below, clients)]
        weights += [each] * (clients - below)
        below, share_below = clients, share
    cumulative = list(accumulate(weights))
    drawn = rng.choices(names, cum_weights=cumulative, k=len(arrivals))
    return [replace(one, tenant=name) for one, name in zip(arrivals, drawn, strict=True)]


def _poisson(rng: Random, rate_rps: float, duration_s: float) -> Iterator[float]:
    at_s = rng.expovariate(rate_rps)
    while at_s < duration_s:
        yield at_s
        at_s += rng.expovariate(rate_rps)

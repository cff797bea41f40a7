"""From a file to what is sent when: read, scaled, cut, fitted to the server."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf
from pathlib import Path

from kvota.core.errors import ConfigError
from kvota.tools.load.asked import Asked
from kvota.tools.load.target import Target
from kvota.tools.replay.prompts import SharedPrompts
from kvota.traffic.arrival import Arrival, Scaling
from kvota.traffic.opening import DAY_S, TraceFormat, open_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Which part of which file, and how it is fitted to the machine that answers."""

    path: Path
    scaling: Scaling = field(default_factory=Scaling)
    requests_max: int | None = None
    seed: int = 1
    poisson_rps: float = 5.0  # for files without times
    from_s: float = 0.0  # of the file's own time
    until_s: float = inf


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests that are to be sent. Their times count from `source.from_s`."""

    source: Source
    format: TraceFormat
    arrivals: list[Arrival]
    num_passed_over: int

    @property
    def window_s(self) -> float:
        """First arrival to the last, and one mean gap more."""
        last_s, num_gaps = self.arrivals[-1].at_s, len(self.arrivals) - 1
        return last_s * (1 + 1 / num_gaps) if last_s and num_gaps else last_s + 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`asked` by time."""

    recorded: Recorded
    asked: list[Asked]
    num_too_long: int  # for the model's window: left out


def read(source: Source) -> Recorded:
    """Raises ConfigError when the file cannot be read, or has nothing in what was asked for."""
    traffic = open_traffic(
        source.path,
        seed=source.seed,
        poisson_rps=source.poisson_rps,
        from_s=source.from_s,
        until_s=min(source.until_s, DAY_S),
    )
    part = traffic.arrivals
    if traffic.format is not TraceFormat.SERVEGEN:  # which was read from there
        part = _between(part, source.from_s, source.until_s)
    try:
        scaled = list(islice(source.scaling.apply(part), source.requests_max))
    except ValueError as error:
        raise ConfigError(f"{source.path}: {error}.") from None
    if not scaled:
        raise ConfigError(f"{source.path}: no request lies in what was asked for.")
    return Recorded(source, traffic.format, scaled, traffic.passed_over.num)


def plan_for(recorded: Recorded, target: Target) -> Plan:
    """Prompts for that server. Raises ConfigError when no request fits it."""
    prompts = SharedPrompts(target.prompts, recorded.source.seed)
    asked: list[Asked] = []
    num_too_long = 0
    for number, one in enumerate(recorded.arrivals):
        limit = target.max_model_len
        if limit is not None and one.prompt_tokens + one.output_tokens > limit:
            num_too_long += 1
            continue
        asked.append(_asked(one, prompts.make(one, number), is_exact=target.prompts.is_exact))
    if not asked:
        raise ConfigError(
            f"None of the {num_too_long} requests fits the window of {target.model}, "
            f"{target.max_model_len} tokens. Divide the lengths with --length-scale."
        )
    return Plan(recorded, asked, num_too_long)


def _asked(one: Arrival, prompt: str | list[int], *, is_exact: bool) -> Asked:
    return Asked(
        scheduled_s=one.at_s,
        prompt=prompt,
        max_tokens=one.output_tokens,
        prompt_tokens=one.prompt_tokens if is_exact else None,
        lane=one.tenant,
        n=one.n,
        band=one.band,
    )


def _between(arrivals: Iterator[Arrival], from_s: float, until_s: float) -> Iterator[Arrival]:
    """Those of a span of time, which then begins at 0. `arrivals` are in order of time."""
    for one in takewhile(lambda one: one.at_s < until_s, arrivals):
        if one.at_s >= from_s:
            yield replace(one, at_s=one.at_s - from_s)

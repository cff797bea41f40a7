"""From a window to what is wrong: every cause is asked in turn, the gravest first. Pure.

A new cause is a function and a line in CAUSES.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kvota.tools.doctor import alive, clients, memory, names, pace, refusing
from kvota.tools.doctor.finding import Finding, Level, worst_first
from kvota.tools.doctor.stations import Station, stations
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window

Cause = Callable[[Window, Targets], Iterable[Finding]]

CAUSES: Final[tuple[Cause, ...]] = (
    alive.away,
    alive.stuck,
    alive.node_restarts,
    alive.backends,
    alive.failing_steps,
    memory.leak,
    refusing.retry_storm,
    refusing.refusing,
    memory.thrash,
    pace.first_token,
    pace.per_token,
    clients.slow_readers,
    clients.giving_up,
    clients.asking_wrongly,
    memory.growing_process,
    memory.prefix_cache,
)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`num_ended`: requests that ended in the window; None where the server does not count."""

    verdict: str
    findings: tuple[Finding, ...]
    stations: tuple[Station, ...]
    span_s: float
    num_ended: int | None
    is_partly_hidden: bool  # an operator's key would show which requests and keys it is about


def diagnose(window: Window, targets: Targets) -> Diagnosis:
    found = worst_first(one for cause in CAUSES for one in cause(window, targets))
    ended = window.grew(*names.ENDED)
    return Diagnosis(
        verdict=_verdict(window, found, ended),
        findings=tuple(found),
        stations=stations(window),
        span_s=window.span_s,
        num_ended=None if ended is None else round(ended),
        is_partly_hidden=window.has_gateway and (not window.live or window.last.usage is None),
    )


def _verdict(window: Window, found: list[Finding], ended: float | None) -> str:
    problems = [one for one in found if one.level is Level.PROBLEM]
    if problems:
        more = len(problems) - 1
        rest = f" ({more} more below)" if more else ""
        name = problems[0].name
        return f"{name[0].upper()}{name[1:]}.{rest}"
    open_work = max([*window.gauge(*names.RUNNING), *window.gauge(*names.WAITING)], default=0.0)
    if not ended and not open_work:
        return f"Nothing to judge by: no request in {window.span_s:.0f} s."
    notes = f" Worth knowing: {', '.join(one.name for one in found)}." if found else ""
    return f"No problem in the last {window.span_s:.0f} s.{notes}"

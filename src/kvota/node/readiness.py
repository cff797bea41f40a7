"""Progress, not only life: whether the engine moves while work waits, and one word when it stops.

Idle is not stuck, and neither is a long step within the runner's limit. Whoever probes gets the
answer each time; the log gets one line when the engine is first found stuck, which says where,
and one when it moves again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvota.core.clock import Clock
from kvota.node.ports import Phase, Runner
from kvota.telemetry.log import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An engine that stands still, or did until now (`is_over`). Counts are requests."""

    is_over: bool
    lasted_s: float  # since the last step ended
    phases: Mapping[Phase, int]  # only those that occur

    @property
    def num_waiting(self) -> int:
        return self.phases.get(Phase.QUEUED, 0) + self.phases.get(Phase.PAUSED, 0)

    @property
    def num_running(self) -> int:
        return sum(self.phases.values()) - self.num_waiting


ReportStall = Callable[[Stall], None]


class Progress:
    """Watches one runner. `report` is called once when it gets stuck and once when it recovers."""

    def __init__(self, runner: Runner, clock: Clock, report: ReportStall) -> None:
        self._runner = runner
        self._clock = clock
        self._report = report
        self._stuck_since_s: float | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def is_stuck(self) -> bool:
        """The answer to a probe; reports, soon after, when it differs from the last one."""
        now = self._clock.now()
        is_stuck = self._runner.is_stuck(now)
        if is_stuck and self._stuck_since_s is None:
            self._stuck_since_s = now - self._runner.stalled_s(now)
            self._begin_to_tell(now - self._stuck_since_s, is_over=False)
        elif not is_stuck and self._stuck_since_s is not None:
            lasted_s, self._stuck_since_s = now - self._stuck_since_s, None
            self._begin_to_tell(lasted_s, is_over=True)
        return is_stuck

    def _begin_to_tell(self, lasted_s: float, *, is_over: bool) -> None:
        """Beside the probe, because a stuck engine is slow to say where its requests are."""
        task = asyncio.ensure_future(self._tell(lasted_s, is_over=is_over))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, lasted_s: float, *, is_over: bool) -> None:
        phases = Counter(view.phase for view in await self._runner.views())
        self._report(Stall(is_over=is_over, lasted_s=lasted_s, phases=phases))


def stall_log(log: Log) -> ReportStall:
    """One line for each report."""

    def report(stall: Stall) -> None:
        say, event = (log.info, "engine moves") if stall.is_over else (log.error, "engine stuck")
        say(
            event,
            seconds_without_step=round(stall.lasted_s, 1),
            running=stall.num_running,
            waiting=stall.num_waiting,
            **{phase.value: count for phase, count in stall.phases.items()},
        )

    return report


def tell_nobody(stall: Stall) -> None:
    """For applications that keep no log."""

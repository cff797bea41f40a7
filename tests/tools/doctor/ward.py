"""Where illnesses are created: stages with a cost for each token, and two looks with work between.

with ward(node) as patient:
    …make it ill…
assert patient.names == [...]
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvota.core.plan import StepPlan, StepResult
from kvota.tools.doctor.diagnosis import Diagnosis, diagnose
from kvota.tools.doctor.finding import Finding
from kvota.tools.doctor.names import ENDED
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.watch import Patient
from kvota.tools.doctor.window import Reading, Window
from tests.support.live_node import until
from tests.support.stage import Stage

ENDLESS_S = 1e6


class CostlyStage(Stage):
    """A step takes as long as its tokens and its sequences cost; each tenth may take longer."""

    def __init__(
        self,
        *,
        token_s: float = 0.0,
        sequence_s: float = 0.0,
        tenth_s: float = 0.0,
        **memory: int,
    ) -> None:
        super().__init__(**memory)
        self._token_s = token_s
        self._sequence_s = sequence_s
        self._tenth_s = tenth_s

    def execute(self, plan: StepPlan) -> StepResult:
        num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        cost_s = self._token_s * num_tokens + self._sequence_s * len(plan.chunks)
        time.sleep(cost_s + (self._tenth_s if len(self.plans) % 10 == 9 else 0.0))
        return super().execute(plan)


class Examined:
    """What was found, once the block of `ward` has ended."""

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None

    @property
    def found(self) -> Diagnosis:
        assert self.diagnosis is not None
        return self.diagnosis

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.found.findings]

    def the(self, name: str) -> Finding:
        assert name in self.names, self.found
        return next(one for one in self.found.findings if one.name == name)

    def mean_s(self, station: str) -> float | None:
        return next(one.mean_s for one in self.found.stations if one.name == station)


def num_ended(reading: Reading) -> float:
    return next((value for name in ENDED if (value := reading.page.total(name)) is not None), 0.0)


@contextmanager
def ward(
    url: str, *, ended: int = 0, num_looks: int = 1, api_key: str | None = None, **targets: Any
) -> Iterator[Examined]:
    """One look before the block, `num_looks` at its end. `targets` are those of Targets.

    Without a target of the test's own nothing is late, for this machine may be busy. The looks
    at the end wait until the server has counted `ended` requests: it does so after their answers.
    """
    examined = Examined()
    with Patient(url, api_key) as patient:
        first = patient.read(with_usage=True)
        yield examined
        until(lambda: num_ended(patient.read()) >= num_ended(first) + ended, "all to be counted")
        readings = [first, *(patient.read() for _ in range(num_looks - 1))]
        readings.append(patient.read(with_usage=True))
    wanted = {"ttft_s": ENDLESS_S, "tpot_s": ENDLESS_S, **targets}
    examined.diagnosis = diagnose(Window(readings), Targets(**wanted))

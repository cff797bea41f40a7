"""Fairness between tenants, held to the bound of VTC (Sheng et al., OSDI 2024) at every step.

    |service_u − service_v| ≤ 2 · max(w_in · L_in, w_out · M)

while both have requests waiting. Service counts uncached prompt tokens once, on admission, and each
token produced w_out times, divided by the tenant's weight; M is the KV capacity in tokens, L_in the
longest prompt so far.

The bound speaks of one line. So tenants are compared that have only ever asked for what stands in
the same one: interactive, short, and with no prefix that others share, which nobody is charged for.
Of all others nothing is claimed. Leads are kept as a matrix, so a step costs microseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvota.core.request import Band
from kvota.sim.checkers import Checker
from kvota.sim.records import RequestRecord
from kvota.traffic.arrival import Arrival

PROMPT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
TENANTS_MAX: Final = 256  # compared; the first to come
Array = npt.NDArray[np.float64]


class Fairness(Checker):
    """`long_above`: prompts of more tokens stand in another line; None: there is but one."""

    def __init__(
        self,
        capacity_tokens: int,
        prompt_tokens_max: int = 1,
        *,
        weights: Mapping[str, float] | None = None,
        long_above: int | None = None,
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._prompt_tokens_max = prompt_tokens_max
        self._weights = dict(weights or {})
        self._long_above = long_above
        self.worst = 0.0
        self._places: dict[str, int] = {}
        self._total: Array = np.zeros(TENANTS_MAX)  # service of each
        self._lead: Array = np.zeros((TENANTS_MAX, TENANTS_MAX))  # when both had begun to wait
        self._num_waiting = [0] * TENANTS_MAX
        self._is_out = [False] * TENANTS_MAX  # it has stood in another line
        self._in_line: set[int] = set()  # numbers of requests
        self._rivals: npt.NDArray[np.intp] | None = None  # that wait; None: it has changed

    @property
    def bound(self) -> float:
        most = max(PROMPT_WEIGHT * self._prompt_tokens_max, OUTPUT_WEIGHT * self._capacity_tokens)
        return 2 * most / min([1.0, *self._weights.values()])

    def arrived(self, record: RequestRecord, now: float) -> None:
        place = self._place(record.arrival.tenant)
        if place is None:
            return
        arrival = record.arrival
        self._prompt_tokens_max = max(self._prompt_tokens_max, arrival.prompt_tokens)
        if not self._stands_in_line(arrival):
            self._is_out[place], self._rivals = True, None
        self._in_line.add(record.number)
        self._num_waiting[place] += 1
        if self._num_waiting[place] == 1:
            lead = self._total[place] - self._total
            self._lead[place], self._lead[:, place] = lead, -lead
            self._rivals = None

    def granted(self, record: RequestRecord, now: float) -> None:
        self._leave_line(record)
        self._serve(record.arrival.tenant, PROMPT_WEIGHT * record.arrival.prompt_tokens)

    def produced(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        self._serve(record.arrival.tenant, OUTPUT_WEIGHT * num_tokens)

    def ended(self, record: RequestRecord, now: float) -> None:
        self._leave_line(record)

    def stepped(self, now: float) -> None:
        if self._rivals is None:
            self._rivals = self._find_rivals()
        rivals = self._rivals
        if len(rivals) < 2:
            return
        total = self._total[rivals]
        gaps = np.abs(total[:, None] - total - self._lead[np.ix_(rivals, rivals)])
        widest = float(gaps.max())
        self.worst = max(self.worst, widest)
        assert widest <= self.bound, self._said(gaps, rivals, now)

    def leapt(self, ends_s: Sequence[float]) -> None:
        """In a leap nobody is granted, so every gap goes one way: its end is its worst."""
        self.stepped(ends_s[-1])

    # --- inside

    def _said(self, gaps: Array, rivals: npt.NDArray[np.intp], now: float) -> str:
        names = list(self._places)
        one, other = (int(rivals[at]) for at in np.unravel_index(gaps.argmax(), gaps.shape))
        return (
            f"at {now:.3f} s {names[one]} and {names[other]} are {gaps.max():.0f} weighted tokens "
            f"apart; the bound is {self.bound:.0f}"
        )

    def _stands_in_line(self, arrival: Arrival) -> bool:
        is_short = self._long_above is None or arrival.prompt_tokens <= self._long_above
        return is_short and arrival.band is Band.INTERACTIVE and not arrival.prefix

    def _place(self, tenant: str) -> int | None:
        if tenant not in self._places and len(self._places) < TENANTS_MAX:
            self._places[tenant] = len(self._places)
        return self._places.get(tenant)

    def _find_rivals(self) -> npt.NDArray[np.intp]:
        pairs = zip(self._num_waiting, self._is_out, strict=True)
        return np.array([at for at, (num, out) in enumerate(pairs) if num and not out], np.intp)

    def _serve(self, tenant: str, service: float) -> None:
        place = self._places.get(tenant)
        if place is not None:
            self._total[place] += service / self._weights.get(tenant, 1.0)

    def _leave_line(self, record: RequestRecord) -> None:
        if record.number in self._in_line:
            self._in_line.remove(record.number)
            place = self._places[record.arrival.tenant]
            self._num_waiting[place] -= 1
            if not self._num_waiting[place]:
                self._rivals = None

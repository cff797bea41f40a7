"""From a knee to two settings of the server. Pure.

The recommended rate is 65 % of the knee. The settings make the server keep to it by itself:

  max_running_requests  as many as 99 of 100 requests find open at the recommended rate, and
                        themselves. So at that rate practically nobody waits for a place; above it
                        the batch stops growing, and with it the time per token.
  max_waiting_queue     as many as can wait and still get their first token in time: the rate at
                        which places come free, times half of what the SLO leaves beside the TTFT
                        of an idle server (half, because places come free irregularly, and a line
                        whose mean wait is the limit serves every second one too late). One at
                        least, where anything is left: one in a hundred finds all places taken by
                        chance. Whoever comes after them is told at once when to come back.

A cap on what runs, not on the rate: a rate means something only for requests of the lengths that
were measured, and a desk that sees shorter ones would refuse work it has room for. What runs at
once is what the time per token depends on. The rate itself is printed, for rate limits and plans.
"""

from dataclasses import dataclass
from math import floor

WAIT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Cap:
    """What to set at the server; both count choices, as the settings do."""

    max_running_requests: int
    max_waiting_queue: int

    @property
    def settings(self) -> dict[str, int]:
        return {
            "max_running_requests": self.max_running_requests,
            "max_waiting_queue": self.max_waiting_queue,
        }


def cap_for(*, safe_rps: float, in_flight_p99: float, ttft_slo_s: float, idle_ttft_s: float) -> Cap:
    """`in_flight_p99`: found by an arriving request at `safe_rps`, itself not counted."""
    spare_s = WAIT_SHARE * max(0.0, ttft_slo_s - idle_ttft_s)
    return Cap(
        max_running_requests=max(1, round(in_flight_p99) + 1),
        max_waiting_queue=max(1, floor(safe_rps * spare_s)) if spare_s > 0 else 0,
    )

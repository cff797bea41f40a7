"""What is asked of the server; the diagnosis judges by it. The first two as in `kvota plan`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds and shares. `late_share`: of requests, that may miss a target before it counts."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    late_share: float = 0.05
    stuck_after_s: float = 10.0
    refused_share: float = 0.01  # fewer are a note

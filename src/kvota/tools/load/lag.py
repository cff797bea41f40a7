"""Whether the generator itself was the bottleneck.

It is late in two ways: requests leave after they were due, and, because one loop also reads the
answers, tokens are seen after they came. The first is measured at each request. The second is
measured by a beat: a timer that should fire every `BEAT_S` and notes how late it was.

Rule: at the median and at p99, neither may be more than a tenth of the TTFT that was measured
there. `FLOOR_S`, which nobody who reads an answer notices, is always allowed. A result that breaks
the rule is refused.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvota.core.clock import Clock
from kvota.tools.load.percentiles import percentile

SHARE_MAX = 0.1
FLOOR_S = 0.005
BEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class Lag:
    """Seconds."""

    sent_p50_s: float = 0.0
    sent_p99_s: float = 0.0
    beat_p50_s: float = 0.0
    beat_p99_s: float = 0.0

    @classmethod
    def of(cls, sent_s: Sequence[float], beats_s: Sequence[float]) -> "Lag":
        sent, beats = sorted(sent_s), sorted(beats_s)
        return cls(
            *(percentile(sent, share) if sent else 0.0 for share in (0.5, 0.99)),
            *(percentile(beats, share) if beats else 0.0 for share in (0.5, 0.99)),
        )

    def complaint(self, ttft_p50_s: float, ttft_p99_s: float) -> str | None:
        """Why the result says nothing of the server; None when it does."""
        for share, ttft_s, lags in (
            ("p50", ttft_p50_s, {"sent": self.sent_p50_s, "read": self.beat_p50_s}),
            ("p99", ttft_p99_s, {"sent": self.sent_p99_s, "read": self.beat_p99_s}),
        ):
            for what, lag_s in lags.items():
                allowed_s = max(FLOOR_S, SHARE_MAX * ttft_s)
                if lag_s > allowed_s:
                    return (
                        f"the generator was the bottleneck: it {what} {1000 * lag_s:.1f} ms late "
                        f"at {share}, and {1000 * allowed_s:.1f} ms ({SHARE_MAX:.0%} of the TTFT "
                        f"there) is the most. Give it a core of its own, or less to do."
                    )
        return None


async def beat(clock: Clock, late_s: list[float]) -> None:
    """Note how late a timer is, until cancelled."""
    while True:
        due_s = clock.now() + BEAT_S
        await asyncio.sleep(BEAT_S)
        late_s.append(max(0.0, clock.now() - due_s))

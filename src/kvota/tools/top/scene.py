"""From readings to what is shown: rates from counters, letters for requests, an order for rows."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvota.tools.top.carpark import Blocks, Letters
from kvota.tools.top.samples import Samples
from kvota.tools.top.server import Reading
from kvota.wire.requests import LiveRequest

NUM_SPEEDS_MAX = 240
_LAST = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that one screen shows."""

    model: str
    not_ready: str | None
    uptime_s: float | None
    num_running: int
    num_waiting: int
    speeds: tuple[float, ...]  # tokens per second between readings, the latest last
    refusals: Mapping[str, int]  # by reason, since the server started
    num_preemptions: int
    blocks: Blocks
    served: tuple[LiveRequest, ...]  # they have been granted KV, or were and gave it up
    line: tuple[LiveRequest, ...]  # by position
    letters: Mapping[str, str]  # of those that hold blocks, by request id

    @property
    def speed(self) -> float | None:
        """Tokens per second now; None before the second reading."""
        return self.speeds[-1] if self.speeds else None

    @property
    def requests(self) -> tuple[LiveRequest, ...]:
        return self.served + self.line

    @property
    def holdings(self) -> list[tuple[str, int]]:
        """Letters with the blocks they hold, in the table's order."""
        held = [request for request in self.requests if request.id in self.letters]
        return [(self.letters[request.id], request.kv_blocks) for request in held]


class Watch:
    """Remembers what a Scene needs of earlier readings."""

    def __init__(self) -> None:
        self._letters = Letters()
        self._speeds: deque[float] = deque(maxlen=NUM_SPEEDS_MAX)
        self._tokens: tuple[float, float] | None = None  # when, how many

    def see(self, reading: Reading, now_s: float, unix_s: float) -> Scene:
        """The scene at `now_s`. A server that was started again begins new rates."""
        samples = reading.samples
        self._note_speed(samples.total("kvota_generated_tokens_total"), now_s)
        served, line = _in_order(reading.requests)
        holders = [request.id for request in (*served, *line) if request.kv_blocks]
        return Scene(
            model=_model(reading),
            not_ready=reading.not_ready,
            uptime_s=_uptime_s(samples, unix_s),
            num_running=_count(samples, "kvota_requests_running"),
            num_waiting=_count(samples, "kvota_requests_waiting"),
            speeds=tuple(self._speeds),
            refusals=_refusals(samples),
            num_preemptions=_count(samples, "kvota_preemptions_total"),
            blocks=_blocks(samples),
            served=served,
            line=line,
            letters=self._letters.assign(holders),
        )

    def lose(self) -> None:
        """The server did not answer: the next speed would be the mean of a gap."""
        self._tokens = None

    def _note_speed(self, num_tokens: float | None, now_s: float) -> None:
        if num_tokens is None:
            return
        if self._tokens is not None:
            then_s, before = self._tokens
            if now_s <= then_s:
                return
            if num_tokens >= before:
                self._speeds.append((num_tokens - before) / (now_s - then_s))
            else:
                self._speeds.clear()
        self._tokens = now_s, num_tokens


def _in_order(
    requests: Sequence[LiveRequest],
) -> tuple[tuple[LiveRequest, ...], tuple[LiveRequest, ...]]:
    """Those that run, oldest first, and those in line, by position."""
    line = [request for request in requests if request.position is not None]
    served = [request for request in requests if request.position is None]
    served.sort(key=lambda request: -request.age_s)
    line.sort(key=lambda request: request.position or _LAST)
    return tuple(served), tuple(line)


def _model(reading: Reading) -> str:
    named = reading.samples.label("vllm:num_requests_running", "model_name")
    return named or next((request.model for request in reading.requests), "?")


def _uptime_s(samples: Samples, unix_s: float) -> float | None:
    started_s = samples.total("process_start_time_seconds")
    return None if started_s is None else max(0.0, unix_s - started_s)


def _refusals(samples: Samples) -> dict[str, int]:
    """The most frequent reason first."""
    counts = samples.by("kvota_rejected_total", "reason")
    ranked = sorted(counts, key=lambda reason: (-counts[reason], reason))
    return {reason: int(counts[reason]) for reason in ranked if counts[reason]}


def _blocks(samples: Samples) -> Blocks:
    states = samples.by("kvota_kv_blocks", "state")
    used, cached, free = (int(states.get(state, 0)) for state in ("used", "cached", "free"))
    return Blocks(used, cached, free)


def _count(samples: Samples, name: str) -> int:
    return int(samples.total(name) or 0)

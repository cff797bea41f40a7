"""From readings to what is shown: rates from counters, letters for requests, an order for rows.

A node's page says everything. A gateway in front of foreign engines has a page of its own: it
counts tokens when a request has ended, so those of the requests that run are added; and of the
engines' memory it knows what share is in use.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvota.tools.top.carpark import Blocks, Letters
from kvota.tools.top.samples import Samples
from kvota.tools.top.server import Reading
from kvota.wire.requests import LiveRequest

NUM_SPEEDS_MAX = 240
_LAST = float("inf")
_KV_SHARE = "kvota_gateway_backend_kv_usage_ratio"


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
    kv_shares: Mapping[str, float]  # in use, by backend; empty where there are blocks to show
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
        served, line = _in_order(reading.requests)
        num_tokens = samples.total("kvota_generated_tokens_total")
        if num_tokens is not None:
            self._note_speed(num_tokens, now_s)
        elif (num_ended := samples.total("kvota_gateway_output_tokens_total")) is not None:
            self._note_speed(num_ended + sum(one.output_tokens for one in served), now_s, slack=0.5)
        blocks = _blocks(samples)
        holders = [request.id for request in (*served, *line) if request.kv_blocks]
        return Scene(
            model=_model(reading),
            not_ready=reading.not_ready,
            uptime_s=_uptime_s(samples, unix_s),
            num_running=_count(samples, "kvota_requests_running", len(served)),
            num_waiting=_count(samples, "kvota_requests_waiting", len(line)),
            speeds=tuple(self._speeds),
            refusals=_refusals(samples),
            num_preemptions=_count(samples, "kvota_preemptions_total"),
            blocks=blocks,
            kv_shares={} if blocks.total else samples.by(_KV_SHARE, "backend"),
            served=served,
            line=line,
            letters=self._letters.assign(holders),
        )

    def lose(self) -> None:
        """The server did not answer: the next speed would be the mean of a gap."""
        self._tokens = None

    def _note_speed(self, num_tokens: float, now_s: float, *, slack: float = 0.0) -> None:
        """A number that falls is of a server that was started again, unless only by `slack` of it:
        a request may end between the reading of the list and that of the page.
        """
        if self._tokens is not None:
            then_s, before = self._tokens
            if now_s <= then_s:
                return
            if num_tokens >= before * (1 - slack):
                num_tokens = max(num_tokens, before)
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
    if named:
        return named
    models = sorted({request.model for request in reading.requests})
    return ", ".join(models) or "?"


def _uptime_s(samples: Samples, unix_s: float) -> float | None:
    started_s = samples.total("process_start_time_seconds")
    if started_s is None:
        started_s = samples.total("kvota_gateway_process_start_time_seconds")
    return None if started_s is None else max(0.0, unix_s - started_s)


def _refusals(samples: Samples) -> dict[str, int]:
    """The most frequent reason first."""
    counts = samples.by("kvota_rejected_total", "reason")
    if not counts:
        counts = samples.by("kvota_gateway_rejected_total", "code")
    ranked = sorted(counts, key=lambda reason: (-counts[reason], reason))
    return {reason: int(counts[reason]) for reason in ranked if counts[reason]}


def _blocks(samples: Samples) -> Blocks:
    """A node's. The page of a gateway's desks has none cached: whose blocks are, nobody knows."""
    states = samples.by("kvota_kv_blocks", "state")
    if "cached" not in states:
        return Blocks(0, 0, 0)
    used, cached, free = (int(states.get(state, 0)) for state in ("used", "cached", "free"))
    return Blocks(used, cached, free)


def _count(samples: Samples, name: str, otherwise: int = 0) -> int:
    number = samples.total(name)
    return otherwise if number is None else int(number)

"""What the desks for foreign engines have seen, under a node's names: times, tokens, predictions.

A place at a desk that is left is counted once, from what came back through the gateway. Times of
tokens are those at which they arrived here. Labels are looked up once for each backend: a request
costs a few additions.
"""

from functools import partial
from typing import Final

from prometheus_client import generate_latest

from kvota.gateway.upstream.passage import Tally
from kvota.gateway.upstream.place import Place
from kvota.telemetry.metrics import SECONDS, TOKEN_SECONDS, TOKENS, PlainRegistry
from kvota.telemetry.series import Counter, Histogram

_LABELS: Final = ("backend",)


class DeskMetrics:
    """One per gateway."""

    def __init__(self) -> None:
        self._registry = PlainRegistry()
        self.queue_s = self._seconds("request_queue", "Arrival to the grant.")
        self.first_token_s = self._seconds("time_to_first_token", "Arrival to the first content.")
        self.token_s = self._seconds(
            "time_per_output_token", "Mean gap between tokens of a choice.", TOKEN_SECONDS
        )
        self.request_s = self._seconds("request", "Arrival to the last byte of the answer.")
        self.retry_error_s = self._seconds(
            "retry_after_error", "Retry-After told, against when room came; absolute."
        )
        self.eta_error_s = self._seconds(
            "eta_error", "Wait told in line, against the wait it became; absolute."
        )
        self.forecast_error = Histogram(
            "kvota_forecast_error_tokens",
            "Output length, forecast at the grant, minus what it became; absolute.",
            _LABELS,
            buckets=TOKENS,
            registry=self._registry,
        )
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.output = self._counter("output_tokens", "Output tokens.")
        self.hits = self._counter("prefix_hit_tokens", "Prompt tokens cached, as backends say.")
        self._records: dict[str, DeskRecords] = {}

    def of(self, backend: str) -> "DeskRecords":
        """Those of one backend. They go on counting when its settings change."""
        if backend not in self._records:
            self._records[backend] = DeskRecords(self, backend)
        return self._records[backend]

    def render(self) -> bytes:
        """The page in Prometheus text format."""
        return generate_latest(self._registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        full = f"kvota_{name}_seconds"
        return Histogram(full, text, _LABELS, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvota_{name}", text, _LABELS, registry=self._registry)


class DeskRecords:
    """Of one backend's desk (`foreign_desk.PlaceObserver`)."""

    def __init__(self, metrics: DeskMetrics, backend: str) -> None:
        self._queue_s = metrics.queue_s.labels(backend)
        self._first_token_s = metrics.first_token_s.labels(backend)
        self._token_s = metrics.token_s.labels(backend)
        self._request_s = metrics.request_s.labels(backend)
        self._retry_error_s = metrics.retry_error_s.labels(backend)
        self._eta_error_s = metrics.eta_error_s.labels(backend)
        self._forecast_error = metrics.forecast_error.labels(backend)
        self._prompt = metrics.prompt.labels(backend)
        self._output = metrics.output.labels(backend)
        self._hits = partial(metrics.hits.labels, backend)

    def left(self, place: Place, now: float) -> None:
        if place.lease is None:
            return
        arrived_s, tally = place.ticket.arrived_s, place.tally
        self._queue_s.observe(place.queued_s)
        if tally is None or tally.first_token_s is None:
            return
        self._first_token_s.observe(tally.first_token_s - arrived_s)
        self._request_s.observe(now - arrived_s)
        gap_s = _mean_gap_s(tally, place.ticket.n)
        if gap_s is not None:
            self._token_s.observe(gap_s)
        self._prompt.inc(place.prompt_tokens)
        self._output.inc(tally.output_tokens)
        if tally.cached_tokens:  # 0 also where the backend does not say: then there is no figure
            self._hits().inc(tally.cached_tokens)

    def forecast_judged(self, predicted_tokens: float, actual_tokens: int) -> None:
        self._forecast_error.observe(abs(predicted_tokens - actual_tokens))

    def wait_judged(self, predicted_s: float, actual_s: float) -> None:
        self._eta_error_s.observe(abs(predicted_s - actual_s))

    def retry_judged(self, predicted_s: float, actual_s: float) -> None:
        self._retry_error_s.observe(abs(predicted_s - actual_s))

    def lease_paused(self, *, is_repeated: bool) -> None:
        """A foreign engine cannot pause."""


def _mean_gap_s(tally: Tally, num_choices: int) -> float | None:
    """Between the tokens of a choice; None below two tokens, and for what came all at once."""
    num_gaps = tally.output_tokens - num_choices
    if tally.first_token_s is None or tally.last_token_s is None or num_gaps < 1:
        return None
    span_s = tally.last_token_s - tally.first_token_s
    return span_s * num_choices / num_gaps if span_s > 0 else None

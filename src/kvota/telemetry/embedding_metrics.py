"""The Prometheus page of a node that embeds. Same rules as `metrics.py`."""

from collections.abc import Callable, Iterable

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvota.core.errors import Outcome
from kvota.telemetry.metrics import PlainRegistry

_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class EmbeddingMetrics:
    """The average batch is `kvota_embedding_batch_size_sum / _count`."""

    def __init__(self, *, model: str, waiting: Callable[[], tuple[int, int]]) -> None:
        """`waiting` gives texts and tokens in line, read at each scrape."""
        self._model = model
        self._registry = registry = PlainRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Waiting(waiting))
        self._batch = Histogram(
            "kvota_embedding_batch_size", "Texts in one pass.", buckets=_BATCH, registry=registry
        )
        self._pass_s = Histogram(
            "kvota_step_seconds", "One forward pass.", buckets=_SECONDS, registry=registry
        )
        self._queue_s = Histogram(
            "kvota_request_queue_seconds", "A text's wait for its pass.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._request_s = Histogram(
            "kvota_request_seconds", "Arrival to the last byte.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter("kvota_prompt_tokens", "Tokens embedded.", registry=registry)
        self._padding = Counter(
            "kvota_padding_tokens", "Tokens computed that no text has.", registry=registry
        )
        self._requests = Counter(
            "kvota_requests", "Ended requests.", ["model", "outcome"], registry=registry
        )
        self._rejected = Counter("kvota_rejected", "Refused.", ["reason"], registry=registry)

    def observe_pass(self, *, num_texts: int, num_tokens: int, num_computed: int, s: float) -> None:
        self._batch.observe(num_texts)
        self._pass_s.observe(s)
        self._tokens.inc(num_tokens)
        self._padding.inc(num_computed - num_tokens)

    def observe_wait(self, seconds: float) -> None:
        self._queue_s.observe(seconds)

    def observe_request(self, outcome: Outcome, code: str | None, total_s: float) -> None:
        self._requests.labels(self._model, outcome.value).inc()
        if code is not None and outcome in (Outcome.REFUSED, Outcome.QUEUE_TIMEOUT):
            self._rejected.labels(code).inc()
        if outcome is Outcome.COMPLETED:
            self._request_s.observe(total_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Waiting(Collector):
    def __init__(self, waiting: Callable[[], tuple[int, int]]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        num_texts, num_tokens = self._waiting()
        yield GaugeMetricFamily("kvota_texts_waiting", "Texts in line.", value=num_texts)
        yield GaugeMetricFamily("kvota_tokens_waiting", "Tokens in line.", value=num_tokens)

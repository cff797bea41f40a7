"""The gateway's own Prometheus page, and how it is put together with its node's.

Names begin with `kvota_gateway_`, so the page of the one node behind `kvota serve` follows on the
same page unchanged, and whatever reads a node reads `kvota serve`. Gauges are read at the scrape.
No label holds a key, a request id or a name that a client made up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvota.gateway.calls import Call
from kvota.gateway.dispatch import Ended
from kvota.telemetry.metrics import PlainRegistry
from kvota.telemetry.series import Counter, Histogram, Spread

_PREFIX: Final = "kvota_gateway"
_Row = tuple[str, float] | tuple[str, str, float]
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendGauges:
    """One backend at this moment. Counts are requests; `breaker` is the name of its state."""

    name: str
    is_healthy: bool
    breaker: str
    num_open: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGauges:
    """The supervised node at this moment."""

    is_up: bool
    num_starts: int
    load_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Everything that is read and not counted. `weights`: of (model, version)."""

    backends: tuple[BackendGauges, ...] = ()
    weights: tuple[tuple[str, str, float], ...] = ()
    ejected: tuple[str, ...] = ()
    node: NodeGauges | None = None
    num_open: int = 0
    retry_tokens: float = 0.0
    is_limits_degraded: bool = False


class GatewayMetrics:
    """One per gateway. `gauges` is called at each scrape."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._registry = registry = PlainRegistry()
        ProcessCollector(namespace=_PREFIX, registry=registry)
        registry.register(_GaugePage(gauges))
        self._requests = self._counter("requests", "Ended requests.", "model", "outcome")
        self._rejected = self._counter("rejected", "Requests refused, by code.", "code")
        self._request_s = self._histogram("request", "Arrival to the last byte of the answer.")
        self._first_token_s = self._histogram(
            "time_to_first_token", "Arrival to the first content."
        )
        self._door_s = self._histogram("door", "Arrival to the attempt that was answered.")
        self._queue_s = self._histogram(
            "queue", "In line: at a desk here, counted from arrival; at a node, as it says."
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.", "model")
        self._output = self._counter("output_tokens", "Output tokens.", "model")
        self._attempts = self._counter("attempts", "Attempts on backends.", "backend", "ending")
        self._fallbacks = self._counter("fallbacks", "Answers by another model.", "model")
        self._denied = self._counter("denied", "Requests without a good key.", "reason")
        self._blocks = self._counter("abuse_blocks", "Callers shut out for a while.", "suspect")
        self._rollbacks = self._counter("rollbacks", "Versions taken out.", "model", "version")
        self._node_ends = self._counter("node_ends", "Ends of the node's process.", "why")
        self._reloads = self._counter("reloads", "Reloads of the settings.", "ending")

    def observe(self, call: Call) -> None:
        """Record one ended request."""
        self._requests.labels(call.model, call.outcome).inc()
        if call.code is not None and call.status in (401, 403, 429, 503):
            self._rejected.labels(call.code).inc()
        if call.caller is None and call.why is not None:
            self._denied.labels(call.why).inc()
        if call.fallback is not None:
            self._fallbacks.labels(call.model).inc()
        if call.first_token_s is not None:
            self._observe_times(call)
        self._prompt.labels(call.model).inc(call.read_tokens)
        self._output.labels(call.model).inc(call.output_tokens)

    def _observe_times(self, call: Call) -> None:
        """Of a request that was answered. Embeddings have no first token."""
        ttft_s = call.ttft_s
        if ttft_s is not None:
            self._first_token_s.observe(ttft_s)
        self._request_s.observe(call.total_s)
        if call.sent_s is not None:
            self._door_s.observe(call.sent_s - call.arrived_s)
        if call.queued_s is not None:
            self._queue_s.observe(call.queued_s)

    def attempt_ended(self, ended: Ended) -> None:
        ending = "ok" if ended.failure is None else ended.failure.value
        self._attempts.labels(ended.backend, ending).inc()

    def blocked(self, suspect: str) -> None:
        self._blocks.labels(suspect).inc()

    def rolled_back(self, model: str, version: str) -> None:
        self._rollbacks.labels(model, version).inc()

    def node_ended(self, why: str) -> None:
        self._node_ends.labels(why).inc()

    def reloaded(self, *, is_taken: bool) -> None:
        self._reloads.labels("taken" if is_taken else "refused").inc()

    def render(self) -> bytes:
        """The page in Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Spread:
        full = f"{_PREFIX}_{name}_seconds"
        return Histogram(full, text, buckets=_SECONDS, registry=self._registry).labels()


class _GaugePage(Collector):
    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        now = self._gauges()
        yield from _backend_families(now.backends)
        yield _labelled("version_weight", "Share of a version.", ["model", "version"], now.weights)
        ejected = [(name, 1.0) for name in now.ejected]
        yield _labelled("backend_ejected", "Left out as an outlier.", ["backend"], ejected)
        yield _plain("requests_open", "Requests under way.", now.num_open)
        yield _plain("retry_budget", "Retries that may be made now.", now.retry_tokens)
        yield _plain("limits_degraded", "Limits are kept here alone.", now.is_limits_degraded)
        if now.node is not None:
            yield _plain("node_up", "The node's process serves.", now.node.is_up)
            yield _plain("node_starts", "Starts of the node's process.", now.node.num_starts)
            yield _plain("node_load_seconds", "What its latest start took.", now.node.load_s)
            yield _plain("node_resident_bytes", "Its memory.", now.node.resident_bytes)


def _backend_families(backends: tuple[BackendGauges, ...]) -> Iterable[Metric]:
    for name, text, field in (
        ("backend_healthy", "Its latest probe was good.", "is_healthy"),
        ("backend_requests_open", "Attempts under way.", "num_open"),
        ("backend_requests_running", "As it says.", "running"),
        ("backend_requests_waiting", "As it says.", "waiting"),
        ("backend_kv_usage_ratio", "As it says.", "kv_usage"),
    ):
        rows = [(one.name, float(getattr(one, field))) for one in backends]
        yield _labelled(name, text, ["backend"], rows)
    states = [(one.name, one.breaker, 1.0) for one in backends]
    yield _labelled("breaker_state", "1 for its state.", ["backend", "state"], states)


def _labelled(name: str, text: str, labels: list[str], rows: Iterable[_Row]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=labels)
    for *values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))

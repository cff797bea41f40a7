"""The Prometheus page: one registry per process, handed in, nothing global.

Counters and histograms are fed as things happen. Gauges are not fed at all: they are read from
the engine's latest snapshot when somebody scrapes, so they can never be stale or drift.
No label holds anything a client chose: a model's label is a served name or "unknown".
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvota.core.errors import Outcome

# Buckets; a gateway's desks have the same, so that both can be summed.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.05, 0.25)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """The engine at the end of its latest step. Counts are blocks or choices.

    The KV cache is reserved whole at the start; the operating system gives a block's memory when
    it is first written. `kv_touched_bytes` is what it has given.
    """

    num_blocks: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0  # free to take, but still holding a reusable prefix
    num_blocks_used: int = 0
    kv_touched_bytes: int = 0
    num_blocks_held_after_abort: int = 0
    block_size: int = 0
    num_running: int = 0
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskGauges:
    """The desk at this moment. Requests by lane, and by (lane, band) where they wait."""

    running: Mapping[str, int]
    waiting: Mapping[tuple[str, str], int]
    num_waiting: int
    num_blocks_held_after_end: int  # by leases that have ended and are not confirmed yet
    limits: Mapping[str, float] = field(default_factory=dict)  # settings in force, by name


class FinishedRequest(Protocol):
    """What the metrics need of a request's record."""

    @property
    def model(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def code(self) -> str | None: ...
    @property
    def read_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def kv_block_s(self) -> float: ...
    @property
    def queued_s(self) -> float | None: ...
    @property
    def first_token_s(self) -> float | None: ...
    @property
    def decode_s(self) -> float | None: ...
    @property
    def time_per_output_token_s(self) -> float | None: ...
    @property
    def total_s(self) -> float: ...


class Metrics:
    """Every metric of a node. Also hears what the desk has to say of its predictions.

    `gauges` and `desk` are called at each scrape, on the scraping thread.
    """

    def __init__(
        self, *, model: str, gauges: Callable[[], EngineGauges], desk: Callable[[], DeskGauges]
    ) -> None:
        self._registry = registry = PlainRegistry()
        ProcessCollector(registry=registry)
        registry.register(_GaugePage(model, gauges, desk))
        self._queue_s = _histogram(registry, "request_queue", "Arrival to the first chunk.")
        self._first_token_s = _histogram(
            registry, "time_to_first_token", "Arrival to the first sampled token."
        )
        self._decode_s = _histogram(registry, "decode", "First to last sampled token.")
        self._stream_s = _histogram(
            registry, "stream", "Last sampled token to the last byte handed over."
        )
        self._token_s = _histogram(
            registry, "time_per_output_token", "Mean gap between tokens.", TOKEN_SECONDS
        )
        self._request_s = _histogram(registry, "request", "Arrival to the last byte of the answer.")
        self._step_s = _histogram(registry, "step", "One forward pass.", _STEP_SECONDS)
        self._scheduler_s = _histogram(
            registry, "scheduler", "A step without its forward pass.", _OVERHEAD_SECONDS
        )
        self._batch = Histogram(
            "kvota_step_batch_size", "Sequences in one step.", buckets=_BATCH, registry=registry
        )
        self._prompt = _counter(registry, "prompt_tokens", "Prompt tokens read, cached ones too.")
        self._output = _counter(registry, "output_tokens", "Sampled tokens of ended requests.")
        self._hits = _counter(registry, "prefix_hit_tokens", "Prompt tokens found in the cache.")
        self._block_s = _counter(registry, "kv_block_seconds", "KV blocks, times seconds held.")
        self._generated = _counter(registry, "generated_tokens", "Tokens sampled, as they come.")
        self._speculated = _counter(
            registry, "speculated_tokens", "Guesses computed beside a sequence's last token."
        )
        self._speculated_right = _counter(
            registry, "speculated_tokens_accepted", "Of those, what was drawn then."
        )
        self._prefilled = _counter(registry, "prefill_tokens", "Prompt tokens computed.")
        self._forecast_error = Histogram(
            "kvota_forecast_error_tokens",
            "Output length, forecast at the grant, minus what it became; absolute.",
            buckets=TOKENS,
            registry=registry,
        )
        self._retry_error_s = _histogram(
            registry, "retry_after_error", "Retry-After told, against when room came; absolute."
        )
        self._eta_error_s = _histogram(
            registry, "eta_error", "Wait told in line, against the wait it became; absolute."
        )
        self._failures = _counter(registry, "step_failures", "Steps that the model runtime failed.")
        self._preemptions = _counter(
            registry, "preemptions", "Sequences set back to be recomputed."
        )
        self._pauses = _counter(registry, "pauses", "Requests paused by the desk for others.")
        self._repeated = _counter(registry, "repeated_pauses", "Of those, paused before: thrash.")
        self._requests = Counter(
            "kvota_requests", "Ended requests.", ["model", "outcome"], registry=registry
        )
        self._rejected = Counter(
            "kvota_rejected", "Requests refused with 503.", ["reason"], registry=registry
        )

    def observe_step(
        self,
        *,
        executor_s: float,
        overhead_s: float,
        num_sequences: int,
        num_prefilled: int,
        num_sampled: int,
        num_speculated: int,
        num_speculated_right: int,
        num_preemptions: int,
    ) -> None:
        """Record one step of the engine; called from the engine's thread."""
        self._step_s.observe(executor_s)
        self._scheduler_s.observe(overhead_s)
        self._batch.observe(num_sequences)
        self._generated.inc(num_sampled)
        if num_speculated:
            self._speculated.inc(num_speculated)
            self._speculated_right.inc(num_speculated_right)
        if num_prefilled:
            self._prefilled.inc(num_prefilled)
        if num_preemptions:
            self._preemptions.inc(num_preemptions)

    def observe_failure(self) -> None:
        """Record that the model runtime raised."""
        self._failures.inc()

    def observe_request(self, request: FinishedRequest) -> None:
        """Record one ended request, whatever its outcome."""
        self._requests.labels(request.model, request.outcome.value).inc()
        if request.code and request.outcome in (Outcome.REFUSED, Outcome.QUEUE_TIMEOUT):
            self._rejected.labels(request.code).inc()
        self._prompt.inc(request.read_tokens)
        self._output.inc(request.output_tokens)
        self._hits.inc(min(request.cached_tokens, request.read_tokens))
        self._block_s.inc(request.kv_block_s)
        if request.queued_s is not None:
            self._queue_s.observe(request.queued_s)
        if request.first_token_s is not None:
            self._first_token_s.observe(request.first_token_s)
            self._request_s.observe(request.total_s)
            decode_s = request.decode_s or 0.0
            self._decode_s.observe(decode_s)
            self._stream_s.observe(max(request.total_s - request.first_token_s - decode_s, 0.0))
        if request.time_per_output_token_s is not None:
            self._token_s.observe(request.time_per_output_token_s)

    def forecast_judged(self, predicted_tokens: float, actual_tokens: int) -> None:
        """A choice has ended by itself."""
        self._forecast_error.observe(abs(predicted_tokens - actual_tokens))

    def wait_judged(self, predicted_s: float, actual_s: float) -> None:
        """A request that was told an ETA has begun."""
        self._eta_error_s.observe(abs(predicted_s - actual_s))

    def retry_judged(self, predicted_s: float, actual_s: float) -> None:
        """The room that a refused request was told to come back for is there."""
        self._retry_error_s.observe(abs(predicted_s - actual_s))

    def lease_paused(self, *, is_repeated: bool) -> None:
        """The desk has asked for the memory of a request."""
        self._pauses.inc()
        if is_repeated:
            self._repeated.inc()

    def render(self) -> bytes:
        """The page in Prometheus text format."""
        return generate_latest(self._registry)


class PlainRegistry(CollectorRegistry):
    """A registry without `_created` series: Prometheus does not read them in text format.

    prometheus_client can leave them out only for the whole process.
    """

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class _GaugePage(Collector):
    """Gauges read from one snapshot of the engine and one of the desk."""

    def __init__(
        self, model: str, gauges: Callable[[], EngineGauges], desk: Callable[[], DeskGauges]
    ) -> None:
        self._model = model
        self._gauges = gauges
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        now, desk = self._gauges(), self._desk()
        usage = now.num_blocks_used / now.num_blocks if now.num_blocks else 0.0
        yield _gauge("kvota_kv_cache_usage_ratio", "Share of KV blocks in use.", usage)
        yield _gauge(
            "kvota_kv_blocks_held_after_abort",
            "Blocks that ended requests still hold.",
            now.num_blocks_held_after_abort + desk.num_blocks_held_after_end,
        )
        blocks = GaugeMetricFamily("kvota_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["free"], now.num_blocks_free)
        blocks.add_metric(["cached"], now.num_blocks_cached)
        blocks.add_metric(["used"], now.num_blocks_used)
        yield blocks
        yield _gauge(
            "kvota_kv_touched_bytes",
            "Memory of the KV blocks that were ever used: the part of the cache that is resident.",
            now.kv_touched_bytes,
        )
        running = GaugeMetricFamily(
            "kvota_requests_running", "Requests that hold KV.", labels=["lane"]
        )
        for lane, number in desk.running.items():
            running.add_metric([lane], number)
        yield running
        waiting = GaugeMetricFamily(
            "kvota_requests_waiting", "Requests in line.", labels=["lane", "band"]
        )
        for (lane, band), number in desk.waiting.items():
            waiting.add_metric([lane, band], number)
        yield waiting
        limits = GaugeMetricFamily(
            "kvota_desk_limit", "Settings of the desk, as they are in force.", labels=["setting"]
        )
        for name, value in desk.limits.items():
            limits.add_metric([name], value)
        yield limits
        yield from self._aliases(now, desk, usage)

    def _aliases(self, now: EngineGauges, desk: DeskGauges, usage: float) -> Iterable[Metric]:
        """vLLM's names, so that schedulers made for it work with kvota unchanged."""
        for name, value in (
            ("vllm:num_requests_running", now.num_running),
            ("vllm:num_requests_waiting", desk.num_waiting + now.num_waiting),
            ("vllm:kv_cache_usage_perc", usage),
        ):
            family = GaugeMetricFamily(name, f"Alias: {name}.", labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "KV geometry.", labels=["block_size", "num_gpu_blocks"]
        )
        config.add_metric([str(now.block_size), str(now.num_blocks)], 1)
        yield config


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"kvota_{name}", text, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...] = SECONDS
) -> Histogram:
    return Histogram(f"kvota_{name}_seconds", text, buckets=buckets, registry=registry)

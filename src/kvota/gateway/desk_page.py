"""The desks that a gateway keeps for foreign engines, under the names that a node's desk has.

Whoever reads a node (a dashboard, an autoscaler, `kvota doctor`) so reads a gateway of vLLMs too.
This page follows the gateway's only where no node's does: no name may stand there twice. `backend`
tells the desks apart; KV usage is that of all of them together. Blocks are the backend's where it
says how large they are, else single tokens, which is what a desk here counts in.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskSnapshot
from kvota.gateway.desk_metrics import DeskMetrics
from kvota.telemetry.metrics import PlainRegistry


class KnownMemory(NamedTuple):
    """What is known of a backend's KV: as it reports, or as the settings state."""

    capacity_tokens: int
    block_size: int = 1
    outside_tokens: int | None = None  # used there beyond our leases; None: it does not say
    difference_tokens: int | None = None  # used there less what our leases hold, at its last word


class Desk(NamedTuple):
    """Of the backend of that name. `memory` None: its capacity is our guess."""

    name: str
    now: DeskSnapshot
    settings: DeskSettings
    memory: KnownMemory | None = None


LIMITS: Final = ("max_running_requests", "max_waiting_queue", "queue_timeout_s")


class DeskPage(Collector):
    """One per gateway. `desks` is called at each scrape; embedding desks are none of them."""

    def __init__(
        self, desks: Callable[[], Sequence[Desk]], metrics: DeskMetrics | None = None
    ) -> None:
        self._desks = desks
        self._metrics = metrics
        self._registry = PlainRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The page in Prometheus text format."""
        page = generate_latest(self._registry)
        if page and self._metrics is not None:
            page += self._metrics.render()
        return page

    def collect(self) -> Iterable[Metric]:
        desks = self._desks()
        if not desks:
            return
        yield from _gauges(desks)
        yield from _memory(desks)
        yield from _counters(desks)
        yield from _aliases(desks)


def _gauges(desks: Sequence[Desk]) -> Iterable[Metric]:
    usage = GaugeMetricFamily(
        "kvota_kv_cache_usage_ratio", "KV lent by the desks here, of all that they may lend."
    )
    usage.add_metric([], _usage(desks))
    running = GaugeMetricFamily(
        "kvota_requests_running", "Requests that hold KV.", labels=["backend", "lane"]
    )
    waiting = GaugeMetricFamily(
        "kvota_requests_waiting", "Requests in line.", labels=["backend", "lane", "band"]
    )
    limits = GaugeMetricFamily(
        "kvota_desk_limit", "Settings of the desk in force.", labels=["backend", "setting"]
    )
    for name, now, settings, _ in desks:
        for lane, number in now.running.items():
            running.add_metric([name, lane.value], number)
        for (lane, band), number in now.waiting.items():
            waiting.add_metric([name, lane.value, band.name.lower()], number)
        for setting in LIMITS:
            limits.add_metric([name, setting], getattr(settings, setting))
    yield from (usage, running, waiting, limits)


def _memory(desks: Sequence[Desk]) -> Iterable[Metric]:
    """Of desks whose capacity is known. vLLM's label `engine` keeps those of several apart."""
    blocks = GaugeMetricFamily(
        "kvota_kv_blocks",
        "KV blocks by state; outside: used by the backend beyond what is lent here.",
        labels=["backend", "state"],
    )
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "KV geometry.", labels=["engine", "block_size", "num_gpu_blocks"]
    )
    difference = GaugeMetricFamily(
        "kvota_kv_ledger_difference_tokens",
        "KV that the backend said it uses, less what was lent here at that moment.",
        labels=["backend"],
    )
    for name, now, _, memory in desks:
        if memory is None:
            continue
        if memory.difference_tokens is not None:
            difference.add_metric([name], memory.difference_tokens)
        size = memory.block_size
        free = max(now.capacity_tokens - now.held_tokens, 0) // size
        blocks.add_metric([name, "free"], free)
        blocks.add_metric([name, "used"], -(-now.held_tokens // size))
        if memory.outside_tokens is not None:
            blocks.add_metric([name, "outside"], -(-memory.outside_tokens // size))
        config.add_metric([name, str(size), str(memory.capacity_tokens // size)], 1)
    yield from (blocks, config, difference)


def _counters(desks: Sequence[Desk]) -> Iterable[Metric]:
    ended = CounterMetricFamily("kvota_requests", "Ended requests.", labels=["backend", "outcome"])
    refused = CounterMetricFamily(
        "kvota_rejected", "Requests refused with 503.", labels=["backend", "reason"]
    )
    for name, now, *_ in desks:
        for outcome, number in now.tally.ended.items():
            ended.add_metric([name, outcome.value], number)
        for reason, number in now.tally.refused.items():
            refused.add_metric([name, reason.value], number)
    yield from (ended, refused)


def _aliases(desks: Sequence[Desk]) -> Iterable[Metric]:
    """vLLM's names, summed over the desks, so that schedulers made for it work unchanged."""
    num_waiting = sum(one.now.num_waiting_choices for one in desks)
    for name, value in (
        ("vllm:num_requests_running", sum(one.now.num_choices for one in desks)),
        ("vllm:num_requests_waiting", num_waiting),
        ("vllm:kv_cache_usage_perc", _usage(desks)),
    ):
        yield GaugeMetricFamily(name, f"Alias: {name}.", value=value)


def _usage(desks: Sequence[Desk]) -> float:
    capacity = sum(one.now.capacity_tokens for one in desks)
    return sum(one.now.held_tokens for one in desks) / capacity if capacity else 0.0

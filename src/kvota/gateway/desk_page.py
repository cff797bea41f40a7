"""The desks that a gateway keeps for foreign engines, under the names that a node's desk has.

Whoever reads a node (a dashboard, an autoscaler, `kvota doctor`) so reads a gateway of vLLMs too.
This page follows the gateway's only where no node's does: no name may stand there twice. `backend`
tells the desks apart; KV usage is that of all of them together.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskSnapshot
from kvota.telemetry.metrics import PlainRegistry

Desk = tuple[str, DeskSnapshot, DeskSettings]  # of the backend of that name
LIMITS: Final = ("max_running_requests", "max_waiting_queue", "queue_timeout_s")


class DeskPage(Collector):
    """One per gateway. `desks` is called at each scrape; embedding desks are none of them."""

    def __init__(self, desks: Callable[[], Sequence[Desk]]) -> None:
        self._desks = desks
        self._registry = PlainRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The page in Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        desks = self._desks()
        if not desks:
            return
        yield from _gauges(desks)
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
    for name, now, settings in desks:
        for lane, number in now.running.items():
            running.add_metric([name, lane.value], number)
        for (lane, band), number in now.waiting.items():
            waiting.add_metric([name, lane.value, band.name.lower()], number)
        for setting in LIMITS:
            limits.add_metric([name, setting], getattr(settings, setting))
    yield from (usage, running, waiting, limits)


def _counters(desks: Sequence[Desk]) -> Iterable[Metric]:
    ended = CounterMetricFamily("kvota_requests", "Ended requests.", labels=["backend", "outcome"])
    refused = CounterMetricFamily(
        "kvota_rejected", "Requests refused with 503.", labels=["backend", "reason"]
    )
    for name, now, _ in desks:
        for outcome, number in now.tally.ended.items():
            ended.add_metric([name, outcome.value], number)
        for reason, number in now.tally.refused.items():
            refused.add_metric([name, reason.value], number)
    yield from (ended, refused)


def _aliases(desks: Sequence[Desk]) -> Iterable[Metric]:
    """vLLM's names, summed over the desks, so that schedulers made for it work unchanged."""
    num_waiting = sum(now.num_waiting_choices for _, now, _ in desks)
    for name, value in (
        ("vllm:num_requests_running", sum(now.num_choices for _, now, _ in desks)),
        ("vllm:num_requests_waiting", num_waiting),
        ("vllm:kv_cache_usage_perc", _usage(desks)),
    ):
        yield GaugeMetricFamily(name, f"Alias: {name}.", value=value)


def _usage(desks: Sequence[Desk]) -> float:
    capacity = sum(now.capacity_tokens for _, now, _ in desks)
    return sum(now.held_tokens for _, now, _ in desks) / capacity if capacity else 0.0

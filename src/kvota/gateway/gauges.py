"""Everything that the metrics page reads of a gateway at the moment of a scrape."""

from kvota.core.clock import Clock
from kvota.gateway.backends import Backend, Registry
from kvota.gateway.dispatch import Dispatcher
from kvota.gateway.limits import RateLimits
from kvota.gateway.live import Live
from kvota.gateway.metrics import BackendGauges, Gauges, NodeGauges
from kvota.gateway.routes import RouteTable
from kvota.gateway.supervisor import Supervisor


def read_gauges(
    clock: Clock,
    registry: Registry,
    live: Live,
    dispatcher: Dispatcher,
    limits: RateLimits,
    supervisor: Supervisor | None,
) -> Gauges:
    now, table = clock.now(), live.now.table
    return Gauges(
        backends=tuple(_of_backend(one, now) for one in registry.all()),
        weights=_weights(table),
        ejected=_ejected(table, now),
        node=None if supervisor is None else _of_node(supervisor),
        num_open=live.num_open,
        retry_tokens=dispatcher.budget.tokens(now),
        is_limits_degraded=limits.is_degraded,
    )


def _of_backend(one: Backend, now: float) -> BackendGauges:
    seen = one.replica(now)
    return BackendGauges(
        name=one.name,
        is_healthy=seen.is_healthy,
        breaker=one.breaker.state(now).value,
        num_open=one.num_open,
        running=seen.running,
        waiting=seen.waiting,
        kv_usage=seen.kv_usage,
    )


def _of_node(supervisor: Supervisor) -> NodeGauges:
    return NodeGauges(
        is_up=supervisor.is_up,
        num_starts=supervisor.num_starts,
        load_s=supervisor.load_s or 0.0,
        resident_bytes=supervisor.resident_bytes,
    )


def _weights(table: RouteTable) -> tuple[tuple[str, str, float], ...]:
    return tuple(
        (route.name, version.name, version.weight)
        for route in table.routes.values()
        if len(route.versions) > 1
        for version in route.rollout.versions
    )


def _ejected(table: RouteTable, now: float) -> tuple[str, ...]:
    names = {
        ejection.replica
        for route in table.routes.values()
        for version in route.versions.values()
        for ejection in version.outliers.ejected(now)
    }
    return tuple(sorted(names))

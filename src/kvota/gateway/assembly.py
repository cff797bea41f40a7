"""The parts of a gateway, put together: nothing else builds one."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, Final

from starlette.types import ASGIApp

from kvota.core.clock import Clock
from kvota.core.errors import ConfigError
from kvota.edge.arrival import Arrivals
from kvota.gateway.about import About
from kvota.gateway.abuse import AbuseWatch, Blocked
from kvota.gateway.admin import Admin
from kvota.gateway.app import Pages, create_app
from kvota.gateway.auth import Door
from kvota.gateway.backends import Registry
from kvota.gateway.control import Control
from kvota.gateway.dispatch import Dispatcher
from kvota.gateway.entrance import Entrance
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.gauges import read_gauges
from kvota.gateway.live import Live, Rules
from kvota.gateway.metrics import GatewayMetrics, Gauges
from kvota.gateway.node_life import Reason
from kvota.gateway.own_node import NodePlan, OwnNode
from kvota.gateway.passages import LiveRequests
from kvota.gateway.plan import ServePlan
from kvota.gateway.policy.watch import Verdict
from kvota.gateway.proxy import Parts
from kvota.gateway.records import Records
from kvota.gateway.settings import READ_ONCE
from kvota.gateway.stores import Stores
from kvota.telemetry.journal import new_prefix_numbers
from kvota.telemetry.log import Log

NOTE_RELOADED: Final = (
    "Models, backends, filters and [gateway] are as the file says now. All other sections need a "
    "restart."
)


class Gateway:
    """One gateway: built, not started. `app` answers; `chores` run beside it."""

    def __init__(
        self, plan: ServePlan, stores: Stores, clock: Clock, log: Log, chance: Random,
        closing: ExitStack,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._stores = stores
        self._clock = clock
        self._log = log
        self._chance = chance
        self.registry = Registry(
            clock, chance, log, open_tokenizer=plan.open_tokenizer, limits=plan.edge
        )
        self.own = None if plan.node is None else closing.enter_context(self._new_node(plan.node))
        self._control = Control(
            self.registry, stores.rollouts, chance, plan.environment, plan.read, log,
            own=None if self.own is None else self.own.backend, created=int(time.time()),
        )  # fmt: skip
        self.live: Live = self._control.first(plan.gateway, plan.fleet)
        self._unfit: str | None = None  # why the models that backends have now cannot be taken in
        self.metrics = GatewayMetrics(self._gauges)
        self._abuse = AbuseWatch(self.live.now.abuse, self._blocked)
        self._dispatcher = Dispatcher(
            clock,
            self.live.now.retries,
            on_attempt=self.metrics.attempt_ended,
            on_rollback=self._rolled_back,
        )
        self.app: ASGIApp = self._new_app()

    @property
    def door(self) -> Door:
        return self._stores.door

    # --- life

    def node_is_up(self) -> None:
        """The node has said what it serves: give it a route."""
        if self.own is not None and self.own.supervisor.ready is not None:
            ready = self.own.supervisor.ready
            self._control.own_model = ready.model
            state = self.own.backend.state
            self.own.backend.state = replace(state, max_model_len=ready.max_model_len)

    async def discover(self) -> None:
        """Look at every backend, and route to the models that only they name."""
        await self.registry.probe_all()
        self._rediscover()
        for route in self.live.now.table.routes.values():
            route.refreshed()

    def _rediscover(self) -> None:
        """Where what backends have does not fit the settings, the old table stays until it does."""
        try:
            self._control.rediscover(self.live)
        except ConfigError as error:
            if error.message != self._unfit:  # once, not at every look
                self._log.error("models as before", why=error.message)
            self._unfit = error.message
        else:
            self._unfit = None

    def chores(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run as long as it serves."""
        chores = [
            self._stores.door.watch(),
            self._stores.limits.keep_places(),
            self._stores.usage.keep_flushing(),
            self._stores.rollouts.watch(lambda: self.live.now.table),
            self._keep_looking(),
        ]
        if self.own is not None:
            chores.append(self.own.supervisor.watch())
        return chores

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.live.now.settings.probe_every_s)
            await self.discover()
            now = self._clock.now()
            for route in self.live.now.table.routes.values():
                for ejection in route.review(now):
                    self._log.warning("outlier", backend=ejection.replica, why=ejection.reason)

    def begin_drain(self) -> None:
        """Refuse what is new, and what waits at a desk of ours."""
        self.live.is_draining = True
        for backend in (*self.registry.all(), *self.registry.leaving):
            backend.drain()

    async def close(self) -> None:
        await self._stores.rollouts.store_changes()
        await self.registry.close()
        if self.own is not None:
            await self.own.probe.close()
        await self._stores.limits.close()

    # --- settings

    async def reload(self) -> str:
        """Read the settings again. Returns a note; raises ConfigError, and nothing has changed."""
        try:
            self._control.reload(self.live)
            self._follow(self.live.now)
            self.registry.forget()
            await self.discover()
        except ConfigError as error:
            self.metrics.reloaded(is_taken=False)
            self._log.error("reload refused", why=error.message)
            raise
        except Exception as bug:  # a boundary: no file may end a gateway that serves
            self.metrics.reloaded(is_taken=False)
            self._log.error("reload refused", why="a bug of kvota's", exc_info=bug)
            raise ConfigError(f"The settings cannot be used: {bug!r}.") from bug
        self.metrics.reloaded(is_taken=True)
        held = self._held_to_restart()
        self._log.info("reloaded", models=len(self.live.now.table.routes), needs_restart=held)
        if not held:
            return NOTE_RELOADED
        return f"{NOTE_RELOADED} So do these of [gateway], which have changed: {', '.join(held)}."

    async def reload_or_log(self) -> None:
        """The same for a signal, which nobody waits for."""
        with contextlib.suppress(ConfigError):
            await self.reload()

    def _follow(self, rules: Rules) -> None:
        """What outlives a reload goes by the new settings."""
        self._abuse.settings = rules.abuse
        self._dispatcher.budget.settings = rules.retries
        self.door.hides_models = rules.settings.hide_models
        self.door.allowed_hosts = rules.settings.allowed_hosts

    def _held_to_restart(self) -> list[str]:
        """Settings that the file has changed since the start, and that are read only there."""
        old, new = self._plan.gateway, self.live.now.settings
        return [name for name in READ_ONCE if getattr(old, name) != getattr(new, name)]

    # --- parts

    def _new_node(self, plan: NodePlan) -> OwnNode:
        return OwnNode(
            plan, self._clock, self._log, self._chance, self._node_ended,
            self.registry.desk_metrics, self._plan.edge,
        )  # fmt: skip

    def _new_app(self) -> ASGIApp:
        clock, stores, abuse = self._clock, self._stores, self._abuse
        gatekeeper = Gatekeeper(stores.door, abuse, clock, self._log)
        entrance = Entrance(stores.door, stores.limits, abuse, clock)
        records = Records(
            self.metrics, entrance, self._log, time.time,
            usage=stores.usage, journal=stores.journal, tracing=stores.tracing,
        )  # fmt: skip
        parts = Parts(
            live=self.live,
            entrance=entrance,
            dispatcher=self._dispatcher,
            settings=self._plan.edge,
            clock=clock,
            chance=self._chance,
            arrivals=Arrivals(self._plan.edge, clock, time.time, self._chance),
            record=records,
            keep_usage=records.keep_usage,
            prefix_numbers=None if stores.journal is None else new_prefix_numbers(),
            is_traced=stores.tracing is not None,
        )  # fmt: skip
        own = None if self.own is None else self.own.backend
        pages = Pages(
            about=About(
                self.live, gatekeeper, stores.door, self.metrics, own, self.registry.desk_metrics
            ),
            admin=Admin(
                self.live,
                gatekeeper,
                clock,
                self._log,
                usage=stores.usage,
                rollouts=stores.rollouts,
                reload=self.reload,
            ),
            requests=LiveRequests(self.live, gatekeeper, clock),
            gatekeeper=gatekeeper,
        )
        return create_app(parts, pages)

    def _gauges(self) -> Gauges:
        return read_gauges(
            self._clock,
            self.registry,
            self.live,
            self._dispatcher,
            self._stores.limits,
            None if self.own is None else self.own.supervisor,
        )

    # --- what is told to the operator

    def _node_ended(self, why: Reason) -> None:
        self.metrics.node_ended(why.value)

    def _blocked(self, block: Blocked) -> None:
        self.metrics.blocked(block.suspicion.value)
        self._log.warning(
            "abuse blocked", suspect=block.suspect, kind=block.suspicion.value, s=block.block_s
        )

    def _rolled_back(self, model: str, verdict: Verdict) -> None:
        route = self.live.now.table.find(model)
        if route is None or verdict.version not in route.rollout.rolled_back:
            return  # a late call of versions that a reload has replaced
        self.metrics.rolled_back(model, verdict.version)
        self._stores.rollouts.note(route)
        self._log.error("rolled back", model=model, version=verdict.version, why=verdict.reason)

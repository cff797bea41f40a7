"""Weights that were changed live outlive the gateway, and reach the others on the same database.

    change by an operator ─┐                        ┌─▶ the next process: resumed at its start
    automatic rollback ────┴─▶ kept (store/rollouts)┴─▶ other gateways: within `REFRESH_EVERY_S`

What is kept belongs to the versions that kvota.toml had at the time: their names, what they are
served as, their weights. Where the file says something else when it is read again, the file wins
and the log says so; only a version that was rolled back and stands in the file as before stays
out. Which backends serve a version may change without any of this.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.rollout import Rollout
from kvota.gateway.routes import Route, RouteTable
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.rollouts import (
    DeclaredVersion,
    RolloutStore,
    SavedRollout,
    StoredRollouts,
)
from kvota.telemetry.log import Log

REFRESH_EVERY_S: Final = 2.0
TRIES_MAX: Final = 5  # to store a change that others get in the way of


class RolloutBook:
    """One per gateway. `read` before the first `take_in`; used on one event loop."""

    def __init__(self, store: RolloutStore, log: Log) -> None:
        self._store = store
        self._log = log
        self._saved: dict[str, SavedRollout] = {}
        self._taken_in: dict[str, Rollout] = {}
        self._changed: dict[str, Route] = {}  # not stored yet
        self._unreadable: Mapping[str, str] = {}  # models, and why
        self._has_changed = asyncio.Event()
        self._storing = asyncio.Lock()

    def read(self) -> None:
        """Load what was kept. Blocks. Raises StoreUnusable."""
        self._saved = {row.model: row for row in self._readable(self._store.all())}

    def take_in(self, table: RouteTable) -> None:
        """Bring rollouts that were built anew to where they had been before."""
        for route in table.routes.values():
            if self._taken_in.get(route.name) is not route.rollout:
                self._taken_in[route.name] = route.rollout
                self._resume(route)

    def note(self, route: Route) -> None:
        """Its rollout has changed: store it as soon as possible."""
        self._changed[route.name] = route
        self._has_changed.set()

    async def keep(self, route: Route) -> bool:
        """The same, now. False when it could not be stored; then `watch` tries again."""
        if has_versions(route):
            self.note(route)
        return await self.store_changes()

    async def store_changes(self) -> bool:
        """Store what has been noted. False when some of it could not be."""
        async with self._storing:
            stored = [await self._stored(name) for name in list(self._changed)]
        return all(stored)

    async def catch_up(self, table: RouteTable) -> None:
        """Take over what other gateways have changed meanwhile."""
        if not any(has_versions(route) for route in table.routes.values()):
            return
        async with self._storing:
            try:
                stored = await asyncio.to_thread(self._store.all)
            except StoreUnusable as error:
                self._log.warning("rollouts are not seen", why=error.message)
                return
            for row in self._readable(stored):
                self._see(row, table.routes.get(row.model))

    async def watch(
        self, table: Callable[[], RouteTable], every_s: float = REFRESH_EVERY_S
    ) -> None:
        """Store changes at once, and see those of others, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._has_changed.wait()
            self._has_changed.clear()
            await self.store_changes()
            await self.catch_up(table())

    def _readable(self, stored: StoredRollouts) -> list[SavedRollout]:
        """What can be used. Each row that cannot is told once, as long as it stays so."""
        for model, why in stored.unreadable.items():
            if self._unreadable.get(model) != why:
                self._log.error("rollout cannot be read", model=model, why=why)
        self._unreadable = stored.unreadable
        return stored.rows

    # --- one model

    async def _stored(self, name: str) -> bool:
        """What keeps one model's change out, such as a row that cannot be read, keeps no other."""
        route = self._changed.pop(name)
        is_stored = False
        try:
            await self._store_change(route)
            is_stored = True
        except StoreUnusable as error:
            self._log.warning("rollout is not kept", model=name, why=error.message)
        finally:
            if not is_stored:
                self._changed.setdefault(name, route)
        return is_stored

    def _resume(self, route: Route) -> None:
        saved = self._latest(route.name)
        if saved is None:
            return
        if route.name in self._changed:
            self.note(route)
        if saved.declared == declared(route):
            self._adopt(route, saved, "rollout resumed")
            return
        still_out = [
            name
            for name, why in saved.state.rolled_back.items()
            if _stands_as_before(name, saved, route) and _roll_back(route, name, why)
        ]
        self._log.warning(
            "rollout: the file has changed and wins",
            model=route.name, still_rolled_back=still_out, **_shown(route),
        )  # fmt: skip
        self.note(route)

    def _latest(self, name: str) -> SavedRollout | None:
        """What is kept of a model, or would be if it could have been stored."""
        saved, unsaved = self._saved.get(name), self._changed.get(name)
        if unsaved is None:
            return saved
        revision = 0 if saved is None else saved.revision
        state = unsaved.rollout.state
        return SavedRollout(model=name, revision=revision, declared=declared(unsaved), state=state)

    def _adopt(self, route: Route, saved: SavedRollout, what: str) -> None:
        if saved.state == route.rollout.state:
            return
        try:
            route.rollout.resume(saved.state)
        except ConfigError as error:
            self._log.error("rollout cannot be resumed", model=route.name, why=error.message)
            return
        out = list(saved.state.rolled_back)
        self._log.info(what, model=route.name, rolled_back=out, **_shown(route))

    def _see(self, row: SavedRollout, route: Route | None) -> None:
        if row.model in self._changed or row == self._saved.get(row.model):
            return  # ours will be compared with this when it is stored; or it is ours
        self._saved[row.model] = row
        if route is not None and row.declared == declared(route):
            self._adopt(route, row, "rollout changed by another gateway")

    async def _store_change(self, route: Route) -> None:
        """Raises StoreUnusable, also when others are faster `TRIES_MAX` times."""
        for _ in range(TRIES_MAX):
            known = self._saved.get(route.name)
            row = SavedRollout(
                model=route.name,
                revision=1 if known is None else known.revision + 1,
                declared=declared(route),
                state=route.rollout.state,
            )
            stored = await asyncio.to_thread(self._store.save, row)
            if stored is None:
                self._saved[route.name] = row
                return
            self._give_way(route, stored)
        raise StoreUnusable(f"Others change the rollout of {route.name} all the time.")

    def _give_way(self, route: Route, stored: SavedRollout) -> None:
        """Another gateway was faster: its weights count, but what we took out is out."""
        known = self._saved.get(route.name)
        before = {} if known is None else known.state.rolled_back
        ours = {n: why for n, why in route.rollout.rolled_back.items() if n not in before}
        self._saved[route.name] = stored
        if stored.declared == declared(route):
            self._adopt(route, stored, "rollout changed by another gateway")
        for name, why in ours.items():
            _roll_back(route, name, why)


def has_versions(route: Route) -> bool:
    """There is something to change: a single version gets everything, whatever its weight."""
    return len(route.versions) > 1


def declared(route: Route) -> tuple[DeclaredVersion, ...]:
    """The versions as the file has them."""
    return tuple(
        DeclaredVersion(name, one.model, one.entry.weight) for name, one in route.versions.items()
    )


def _stands_as_before(name: str, saved: SavedRollout, route: Route) -> bool:
    before = {one.name: one for one in saved.declared}
    now = {one.name: one for one in declared(route)}
    return name in now and now[name] == before.get(name)


def _roll_back(route: Route, name: str, why: str) -> bool:
    """False for the stable version, which cannot be taken out."""
    if name == route.rollout.stable:
        return False
    route.rollout.roll_back(name, why)
    return True


def _shown(route: Route) -> dict[str, Any]:
    return {f"weight_{one.name}": one.weight for one in route.rollout.versions}

"""The operator's API: usage, backends, rollouts, reload. Every path needs an admin key.

GET  /admin/usage?since=2026-11-01&until=2026-11-30&key=…&model=…&tenant=…
GET  /admin/backends
GET  /admin/rollouts
POST /admin/rollouts/{model}      {"weights": {"v2": 0.1}} · {"promote": "v2"} · {"roll_back": "v2"}
POST /admin/reload
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.core.clock import Clock
from kvota.core.errors import BackendFailed, ConfigError, InvalidRequest, KvotaError
from kvota.edge.small_body import small_body
from kvota.gateway.about import json_response
from kvota.gateway.auth import model_not_found
from kvota.gateway.backends import Backend
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.live import Live
from kvota.gateway.policy.rollout import Rollout
from kvota.gateway.rollouts import RolloutBook
from kvota.gateway.routes import Route
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.usage import UsageBook, UsageFilter, UsageLine
from kvota.telemetry.log import Log

_EPOCH: Final = date(1970, 1, 1)
_BY_HAND: Final = "by hand"


class RolloutChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /admin/rollouts/{model}: exactly one of the three."""

    weights: dict[str, float] | None = None
    promote: str | None = None
    roll_back: str | None = None


class Admin:
    """One per gateway. `reload` reads the settings again, and raises ConfigError."""

    def __init__(
        self,
        live: Live,
        gatekeeper: Gatekeeper,
        clock: Clock,
        log: Log,
        *,
        usage: UsageBook | None,
        rollouts: RolloutBook,
        reload: Callable[[], Awaitable[str]],
    ) -> None:
        self._live = live
        self._gatekeeper = gatekeeper
        self._clock = clock
        self._log = log
        self._usage = usage
        self._rollouts = rollouts
        self._reload = reload

    async def usage(self, request: HttpRequest) -> Response:
        self._gatekeeper.require_admin(request)
        given = request.query_params
        wanted = UsageFilter(
            key_id=given.get("key"),
            tenant=given.get("tenant"),
            model=given.get("model"),
            first_day=_day(given.get("since"), "since"),
            last_day=_day(given.get("until"), "until"),
        )
        rows = [
            {**msgspec.to_builtins(line), "day": date.fromordinal(_EPOCH.toordinal() + line.day)}
            for line in await self._used(wanted)
        ]
        return json_response({"object": "list", "data": rows})

    async def _used(self, wanted: UsageFilter) -> Sequence[UsageLine]:
        """Raises BackendFailed while the database is away."""
        if self._usage is None:
            return ()
        try:
            return await self._usage.lines(wanted)
        except StoreUnusable as error:
            raise BackendFailed(
                f"Usage cannot be read now; none of it is lost. {error.message}"
            ) from error

    async def backends(self, request: HttpRequest) -> Response:
        self._gatekeeper.require_admin(request)
        now = self._clock.now()
        found = {
            one.name: one
            for route in self._live.now.table.routes.values()
            for one in route.backends
        }
        rows = [_shown_backend(one, now) for one in found.values()]
        return json_response({"object": "list", "data": rows})

    async def rollouts(self, request: HttpRequest) -> Response:
        self._gatekeeper.require_admin(request)
        rows = [_shown_rollout(one) for one in self._live.now.table.routes.values()]
        return json_response({"object": "list", "data": rows})

    async def change_rollout(self, request: HttpRequest) -> Response:
        """Raises ModelNotFound, and InvalidRequest for versions and weights that cannot be.

        `kept` of the answer: the change outlives this process. It counts either way.
        """
        caller = self._gatekeeper.require_admin(request)
        name: str = request.path_params["model"]
        route = self._live.now.table.find(name)
        if route is None:
            raise model_not_found(name)
        change = _change(await small_body(request))
        await self._rollouts.catch_up(self._live.now.table)
        try:
            _apply(route.rollout, change)
        except ConfigError as error:
            raise InvalidRequest(error.message) from error
        self._log.info("rollout", model=route.name, by=caller.key_id, **_weights(route.rollout))
        is_kept = await self._rollouts.keep(route)
        return json_response({**_shown_rollout(route), "kept": is_kept})

    async def reload(self, request: HttpRequest) -> Response:
        """Raises InvalidRequest with what is wrong with the settings; then nothing has changed."""
        self._gatekeeper.require_admin(request)
        try:
            said = await self._reload()
        except KvotaError as error:
            raise InvalidRequest(error.message) from error
        return json_response({"status": "reloaded", "note": said})


def _change(content: bytes) -> RolloutChange:
    try:
        change = msgspec.json.decode(content, type=RolloutChange)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid: {error}.") from error
    given = [one for one in (change.weights, change.promote, change.roll_back) if one is not None]
    if len(given) != 1:
        raise InvalidRequest("Give exactly one of `weights`, `promote` and `roll_back`.")
    return change


def _apply(rollout: Rollout, change: RolloutChange) -> None:
    if change.weights is not None:
        rollout.set_weights(change.weights)
    elif change.promote is not None:
        rollout.promote(change.promote)
    elif change.roll_back is not None:
        rollout.roll_back(change.roll_back, _BY_HAND)


def _shown_rollout(route: Route) -> dict[str, Any]:
    rollout = route.rollout
    versions = [
        {
            "name": one.name,
            "served_as": one.model,
            "weight": one.weight,
            "backends": [backend.name for backend in route.versions[one.name].backends],
            "urls": _urls(route.versions[one.name].backends),
            "rolled_back": rollout.rolled_back.get(one.name),
        }
        for one in rollout.versions
    ]
    return {
        "model": route.name,
        "aliases": route.entry.aliases,
        "stable": rollout.stable,
        "versions": versions,
    }


def _urls(backends: Sequence[Backend]) -> list[str] | None:
    """Where they can be asked themselves, without what may be a password; None: not all can."""
    if any(one.entry.unix_socket is not None for one in backends):
        return None
    parts = [urlsplit(one.entry.url) for one in backends]
    return [one._replace(netloc=one.netloc.rpartition("@")[2]).geturl() for one in parts]


def _shown_backend(one: Backend, now: float) -> dict[str, Any]:
    breaker, replica = one.breaker.snapshot(now), one.replica(now)
    return {
        "name": one.name,
        "kind": one.kind.value,
        "healthy": replica.is_healthy,
        "why": one.state.why or None,
        "breaker": breaker.state.value,
        "retry_after_s": round(breaker.retry_after_s, 1),
        "open": one.num_open,
        "running": replica.running,
        "waiting": replica.waiting,
        "kv_usage": round(replica.kv_usage, 4),
        "latency_s": None if one.latency_s is None else round(one.latency_s, 4),
        "models": list(one.state.models or ()),
    }


def _weights(rollout: Rollout) -> dict[str, float]:
    return {f"weight_{one.name}": one.weight for one in rollout.versions}


def _day(text: str | None, param: str) -> int | None:
    """Days since 1970 of an ISO date. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return (date.fromisoformat(text) - _EPOCH).days
    except ValueError:
        message = f"`{param}` must be a date like 2026-11-30."
        raise InvalidRequest(message, param=param) from None

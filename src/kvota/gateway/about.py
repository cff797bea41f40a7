"""What a gateway says of itself and of its models: /health, /ready, /metrics, /v1/models."""

import contextlib
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.core.errors import KvotaError, Refusal, Refused
from kvota.gateway.auth import Door, model_not_found
from kvota.gateway.backends import Backend
from kvota.gateway.desk_metrics import DeskMetrics
from kvota.gateway.desk_page import Desk, DeskPage, KnownMemory
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.live import Live, going_away
from kvota.gateway.metrics import GatewayMetrics
from kvota.gateway.routes import Route
from kvota.gateway.settings import AUTO
from kvota.gateway.upstream.foreign_desk import ForeignDesk
from kvota.gateway.upstream.kinds import TRAITS
from kvota.wire.responses import ModelCard, ModelList

PAGE_TIMEOUT_S = 5.0
RETRY_AFTER_S = 5.0


class About:
    """The GET paths. `own` is the node that this gateway has started, if it has."""

    def __init__(
        self,
        live: Live,
        gatekeeper: Gatekeeper,
        door: Door,
        metrics: GatewayMetrics,
        own: Backend | None,
        desk_metrics: DeskMetrics,
    ) -> None:
        self._live = live
        self._gatekeeper = gatekeeper
        self._door = door
        self._metrics = metrics
        self._own = own
        self._desks = DeskPage(lambda: _desks(live), desk_metrics)

    async def health(self, request: HttpRequest) -> Response:
        """The process is alive; says nothing else on purpose."""
        return json_response({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Whether new work would be accepted. Raises Refused with the reason."""
        if self._live.is_draining:
            raise going_away()
        own = self._own
        if own is not None:
            assert own.supervised is not None
            if not own.supervised.is_up:
                raise own.supervised.refusal()
            await self._require_node_ready(own)
        elif not any(one.state.is_healthy for one in _backends(self._live)):
            raise Refused(
                Refusal.ENGINE_RESTARTING,
                "No backend answers.",
                retry_after_s=RETRY_AFTER_S,
            )
        return json_response({"status": "ready"})

    async def _require_node_ready(self, own: Backend) -> None:
        """The engine's own word, on the page where its kind gives it."""
        try:
            await own.upstream.fetch(TRAITS[own.kind].health_path, timeout_s=PAGE_TIMEOUT_S)
        except KvotaError as error:
            raise Refused(
                Refusal.ENGINE_RESTARTING,
                f"The engine is not ready: {error.message}",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    async def metrics(self, request: HttpRequest) -> Response:
        """Ours, and where one node alone is behind us, its own as it is; else our desks'."""
        if self._live.now.settings.metrics_need_key:
            self._gatekeeper.require_admin(request)
        page = self._metrics.render()
        nodes = own_nodes(self._live)
        if len(nodes) == 1:
            with contextlib.suppress(KvotaError):  # away: kvota_gateway_node_up says so
                page += await nodes[0].upstream.fetch("/metrics", timeout_s=PAGE_TIMEOUT_S)
        else:
            page += self._desks.render()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: HttpRequest) -> Response:
        """What the caller may ask for."""
        caller = self._gatekeeper.admit(request)
        table = self._live.now.table
        cards = [
            _card(name, route)
            for route in table.routes.values()
            if caller.may_use(*route.names)
            for name in route.names
        ]
        if table.has_tasks:
            first = next(iter(table.routes.values()))
            cards.append(_card(AUTO, first))
        return json_response(ModelList(data=cards))

    async def model(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.admit(request)
        name: str = request.path_params["id"]
        route = self._live.now.table.find(name)
        if route is None:
            raise model_not_found(name)
        self._door.check_model(caller, *route.names)
        return json_response(_card(name, route))


def _desks(live: Live) -> list[Desk]:
    backends = {one.name: one for one in _backends(live)}
    return [
        Desk(name, one.desk.snapshot(), one.desk.settings, _memory(one, one.desk))
        for name, one in backends.items()
        if one.desk is not None
    ]


def _memory(backend: Backend, desk: ForeignDesk) -> KnownMemory | None:
    state = backend.state
    capacity = state.capacity_tokens or backend.entry.kv_tokens
    if capacity is None:
        return None
    outside = None if state.used_tokens is None else desk.pinned_outside_tokens
    return KnownMemory(capacity, state.block_size or 1, outside, desk.difference_tokens)


def own_nodes(live: Live) -> list[Backend]:
    """Every node of ours behind this gateway, each once."""
    found = {one.name: one for one in _backends(live) if one.is_own_kind}
    return list(found.values())


def _backends(live: Live) -> list[Backend]:
    return [one for route in live.now.table.routes.values() for one in route.backends]


def _card(name: str, route: Route) -> ModelCard:
    length = min((one.max_model_len for one in route.backends), default=0)
    return ModelCard(id=name, created=route.created, max_model_len=length)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")

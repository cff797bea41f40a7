"""Paths of a node that the gateway passes on: where requests are, the tokenizer, embeddings.

    GET    /v1/requests · /admin/requests            asked of every own node, and put together
    DELETE /v1/requests/{id} · /admin/requests/{id}  of each, until one knows the id
    POST   /tokenize · /detokenize · /v1/embeddings  of a backend of the model
    GET    /tokenizer_info                           of the first own node
    GET · PUT /admin/desk                            of the own node, or the one in ?backend=NAME

Requests at foreign backends are not listed: where those are, their engines do not tell.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvota.core.clock import Clock
from kvota.core.errors import ClientClosed, InvalidRequest, KvotaError, NotFound
from kvota.edge.exchange import Exchange
from kvota.edge.problems import error_headers, error_response
from kvota.edge.settings import EdgeSettings
from kvota.edge.trust import told
from kvota.gateway.about import json_response, own_nodes
from kvota.gateway.auth import Door, model_not_found
from kvota.gateway.backends import Backend
from kvota.gateway.caller import Caller
from kvota.gateway.dispatch import nobody
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.live import Live
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.upstream.failures import AttemptFailed
from kvota.gateway.upstream.outgoing import outgoing_headers, renamed_body

_Listing = dict[str, Any]


class LiveRequests:
    """The requests of all own nodes, over HTTP."""

    def __init__(self, live: Live, gatekeeper: Gatekeeper) -> None:
        self._live = live
        self._gatekeeper = gatekeeper

    async def list_own(self, request: HttpRequest) -> Response:
        return await self._list("/v1/requests", self._gatekeeper.admit(request))

    async def list_all(self, request: HttpRequest) -> Response:
        return await self._list("/admin/requests", self._gatekeeper.require_admin(request))

    async def delete_own(self, request: HttpRequest) -> Response:
        return await self._delete("/v1/requests/", request, self._gatekeeper.admit(request))

    async def delete(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.require_admin(request)
        return await self._delete("/admin/requests/", request, caller)

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.admit(request)
        for node in own_nodes(self._live):
            status, content, headers = await _ask(node, "GET", "/tokenizer_info", None, caller)
            return Response(content, status, headers)
        raise NotFound("No backend here tells about its tokenizer.")

    async def _list(self, path: str, caller: Caller) -> Response:
        rows: list[Any] = []
        for node in own_nodes(self._live):
            status, content, _ = await _ask(node, "GET", path, None, caller)
            if status == 200:
                rows += msgspec.json.decode(content)["data"]
        return json_response({"object": "list", "data": rows})

    async def _delete(self, path: str, request: HttpRequest, caller: Caller) -> Response:
        name: str = request.path_params["id"]
        raw = request.scope["raw_path"].partition(path.encode())[2].decode("ascii", "replace")
        for node in own_nodes(self._live):
            status, content, headers = await _ask(node, "DELETE", path + raw, None, caller)
            if status != 404:
                return Response(content, status, headers)
        raise NotFound(f"No request that has not ended is called `{name[:128]}`.", param="id")


class NodeDesks:
    """The limits of an own node's desk, read and changed while it works. For operators."""

    def __init__(self, live: Live, gatekeeper: Gatekeeper) -> None:
        self._live = live
        self._gatekeeper = gatekeeper

    async def pass_on(self, request: HttpRequest) -> Response:
        """GET and PUT, as the node answers them."""
        caller = self._gatekeeper.require_admin(request)
        node = self._node(request.query_params.get("backend"))
        body = await request.body() if request.method == "PUT" else None
        status, content, headers = await _ask(node, request.method, "/admin/desk", body, caller)
        return Response(content, status, headers)

    def _node(self, name: str | None) -> Backend:
        nodes = own_nodes(self._live)
        chosen = [one for one in nodes if name in (None, one.name)]
        if not chosen:
            wanted = "" if name is None else f" called `{name[:128]}`"
            raise NotFound(f"No node of ours{wanted} is behind this gateway.", param="backend")
        if len(chosen) > 1:
            names = ", ".join(one.name for one in nodes)
            raise InvalidRequest(f"Say which with ?backend=NAME: {names}.", param="backend")
        return chosen[0]


class _Named(msgspec.Struct):
    model: str | None = None


class PassageEndpoint:
    """An ASGI application for one POST path, answered by a backend of the model it names."""

    def __init__(
        self,
        path: str,
        live: Live,
        gatekeeper: Gatekeeper,
        door: Door,
        settings: EdgeSettings,
        chance: Random,
        clock: Clock,
    ) -> None:
        self._path = path
        self._live = live
        self._gatekeeper = gatekeeper
        self._door = door
        self._settings = settings
        self._chance = chance
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings)
        try:
            caller = self._gatekeeper.admit(HttpRequest(scope))
            content = await exchange.body()
            node, sent = self._target(content, caller)
            status, answer, headers = await _ask(node, "POST", self._path, sent, caller)
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            await exchange.send_whole(status, answer, raw)
        except ClientClosed:
            return
        except KvotaError as error:
            if not exchange.is_gone:
                headers_of = error_headers(error, self._chance)
                await exchange.respond(error.status, error_response(error), headers_of)

    def _target(self, content: bytes, caller: Caller) -> tuple[Backend, bytes]:
        """A backend and the body for it. A body without a model goes to the first own node."""
        name = _model_in(content)
        table = self._live.now.table
        if not name:
            nodes = own_nodes(self._live)
            if not nodes:
                raise InvalidRequest("`model` is missing.", param="model")
            return nodes[0], content
        route = table.find(name)
        if route is None:
            raise model_not_found(name)
        self._door.check_model(caller, route.name)
        now = self._clock.now()
        for version in route.versions.values():
            for backend in version.backends:
                if backend.may_serve:
                    is_same = version.model == name
                    model = version.model
                    return backend, content if is_same else renamed_body(content, model=model)
        raise nobody((route,), now)


def _model_in(content: bytes) -> str | None:
    try:
        return msgspec.json.decode(content, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the node says what is wrong with it


async def _ask(
    backend: Backend, method: str, path: str, body: bytes | None, caller: Caller
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and the headers that a client may see. Raises KvotaError."""
    if backend.supervised is not None and not backend.supervised.is_up:
        raise backend.supervised.refusal()
    upstream = backend.upstream
    headers = outgoing_headers({}, request_id="", kind=backend.kind)
    del headers["x-request-id"]
    try:
        if isinstance(upstream, NodeUpstream):
            for name, value in told(caller.tenant, caller.weight):
                headers[name.decode()] = value.decode("utf-8")
            async with upstream.ask(method, path, body, headers) as reply:
                return reply.status, await reply.body(), _shown(reply.headers)
        async with upstream.open(path, body, headers, method=method) as reply:
            return reply.status, await reply.body(), _shown(reply.headers)
    except AttemptFailed as failed:
        if backend.supervised is not None:
            raise backend.supervised.refusal() from failed
        raise failed.for_client() from failed


def _shown(headers: Mapping[str, str]) -> dict[str, str]:
    names = ("content-type", "retry-after", "x-should-retry")
    return {name: headers[name] for name in names if name in headers}

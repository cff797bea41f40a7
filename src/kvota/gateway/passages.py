"""Pages of nodes that the gateway passes on: where requests are, the tokenizer, the desk.

GET    /v1/requests · /admin/requests            asked of every own node, and put together
                                                 with those whose desk is here
DELETE /v1/requests/{id} · /admin/requests/{id}  here, then of each, until one knows the id
GET    /tokenizer_info                           of the first own node
GET · PUT /admin/desk                            of the own node, or the one in ?backend=NAME
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.core.clock import Clock
from kvota.core.errors import InvalidRequest, KvotaError, NotFound
from kvota.edge.small_body import small_body
from kvota.edge.trust import told
from kvota.gateway.about import json_response, own_nodes
from kvota.gateway.backends import Backend
from kvota.gateway.caller import Caller
from kvota.gateway.foreign_requests import cancel_foreign, foreign_requests, has_foreign
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.live import Live
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.upstream.failures import AttemptFailed
from kvota.gateway.upstream.outgoing import outgoing_headers
from kvota.wire.requests import DeletedRequest


class LiveRequests:
    """The requests at all backends, over HTTP. A client's own are those of its tenant."""

    def __init__(self, live: Live, gatekeeper: Gatekeeper, clock: Clock) -> None:
        self._live = live
        self._gatekeeper = gatekeeper
        self._clock = clock

    async def list_own(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.admit(request)
        return await self._list("/v1/requests", caller, caller.tenant)

    async def list_all(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.require_admin(request)
        return await self._list("/admin/requests", caller, None)

    async def delete_own(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.admit(request)
        return await self._delete("/v1/requests/", request, caller, caller.tenant)

    async def delete(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.require_admin(request)
        return await self._delete("/admin/requests/", request, caller, None)

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        caller = self._gatekeeper.admit(request)
        for node in own_nodes(self._live):
            status, content, headers = await _ask(node, "GET", "/tokenizer_info", None, caller)
            return Response(content, status, headers)
        raise NotFound("No backend here tells about its tokenizer.")

    async def _list(self, path: str, caller: Caller, tenant: str | None) -> Response:
        """`tenant` None: everybody's, for an operator.

        A node that cannot be asked hides nothing but its own; it is an error only where it is all
        that there is.
        """
        now = self._clock.now()
        rows: list[Any] = [
            *foreign_requests(self._live, now, tenant=tenant, with_tenant=tenant is None)
        ]
        away: list[KvotaError] = []
        nodes = _nodes_at_work(self._live)
        for node in nodes:
            try:
                status, content, _ = await _ask(node, "GET", path, None, caller)
            except KvotaError as error:
                away.append(error)
                continue
            if status == 200:
                listed = msgspec.json.decode(content)["data"]
                rows += [{**one, "backend": node.name} for one in listed]
        if away and len(away) == len(nodes) and not has_foreign(self._live):
            raise away[0]
        return json_response({"object": "list", "data": rows})

    async def _delete(
        self, path: str, request: HttpRequest, caller: Caller, tenant: str | None
    ) -> Response:
        name: str = request.path_params["id"]
        num_ended = cancel_foreign(self._live, name, tenant=tenant)
        if num_ended:
            return json_response(DeletedRequest(id=name, num_cancelled=num_ended))
        raw = request.scope["raw_path"].partition(path.encode())[2].decode("ascii", "replace")
        away: KvotaError | None = None  # which may have it
        for node in _nodes_at_work(self._live):
            try:
                status, content, headers = await _ask(node, "DELETE", path + raw, None, caller)
            except KvotaError as error:
                away = away or error
                continue
            if status != 404:
                return Response(content, status, headers)
        if away is not None:
            raise away
        raise NotFound(f"No request that has not ended is called `{name[:128]}`.", param="id")


def _nodes_at_work(live: Live) -> list[Backend]:
    """Every own node that a request may be at, each asked once, whatever the settings call it."""
    nodes = [one for one in live.backends if one.is_own_kind]
    return list({(one.entry.url, one.entry.unix_socket): one for one in reversed(nodes)}.values())


class NodeDesks:
    """The limits of an own node's desk, read and changed while it works. For operators."""

    def __init__(self, live: Live, gatekeeper: Gatekeeper) -> None:
        self._live = live
        self._gatekeeper = gatekeeper

    async def pass_on(self, request: HttpRequest) -> Response:
        """GET and PUT, as the node answers them."""
        caller = self._gatekeeper.require_admin(request)
        node = self._node(request.query_params.get("backend"))
        body = await small_body(request) if request.method == "PUT" else None
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

"""Where is my request: every request that has not ended, and how to end one.

    GET    /v1/requests         DELETE /v1/requests/{id}        a client's own
    GET    /admin/requests      DELETE /admin/requests/{id}     everybody's, for the operator

Behind a gateway a client is its tenant, as the gateway says; on a port of its own the node knows
nobody, so every caller owns every request. Only operators are shown tenants.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.core.errors import NotFound
from kvota.edge.trust import tenant_of
from kvota.node.ports import Phase, RequestView, Runner
from kvota.wire.requests import DeletedRequest, LiveRequest, LiveRequestList


class LiveRequests:
    """The requests of one runner, over HTTP. `trusts_gateway`: its word on the tenant counts."""

    def __init__(self, runner: Runner, *, trusts_gateway: bool = False) -> None:
        self._runner = runner
        self._trusts_gateway = trusts_gateway

    async def list_own(self, request: HttpRequest) -> Response:
        views = await self._own(request)
        return _json(LiveRequestList(data=[_shown(view, with_tenant=False) for view in views]))

    async def list_all(self, request: HttpRequest) -> Response:
        views = await self._runner.views()
        return _json(LiveRequestList(data=[_shown(view, with_tenant=True) for view in views]))

    async def delete_own(self, request: HttpRequest) -> Response:
        """End a request of the caller's. Raises NotFound when none of its own has the id."""
        return self._delete(await self._own(request), request.path_params["id"])

    async def delete(self, request: HttpRequest) -> Response:
        """End anybody's request."""
        return self._delete(await self._runner.views(), request.path_params["id"])

    async def _own(self, request: HttpRequest) -> Sequence[RequestView]:
        views = await self._runner.views()
        if not self._trusts_gateway:
            return views
        tenant = tenant_of(dict(request.headers.raw))
        return [view for view in views if view.tenant == tenant]

    def _delete(self, views: Sequence[RequestView], name: str) -> Response:
        """End what answers to the id, ours or the client's. Raises NotFound when nothing does."""
        meant = _meant(views, name)
        num_cancelled = sum([self._runner.cancel(id_) for id_ in meant])
        if not num_cancelled:
            raise NotFound(f"No request that has not ended is called `{name[:128]}`.", param="id")
        return _json(DeletedRequest(id=name, num_cancelled=num_cancelled))


def _meant(views: Sequence[RequestView], name: str) -> list[str]:
    """Ids of the requests called `name`: by our id, the client's, or the one its chunks carry."""
    live = [view for view in views if view.phase is not Phase.CLOSING]
    if any(view.id == name for view in live):
        return [name]
    call = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return [
        view.id
        for view in live
        if view.client_id == name or view.id.rpartition("-")[0] == call  # one id a prompt
    ]


def _shown(view: RequestView, *, with_tenant: bool) -> LiveRequest:
    return LiveRequest(
        id=view.id,
        client_id=view.client_id,
        tenant=view.tenant if with_tenant else UNSET,
        model=view.model,
        lane=view.lane,
        band=view.band,
        phase=view.phase.value,
        age_s=round(view.age_s, 3),
        position=view.position,
        eta_s=_rounded(view.eta_s),
        eta_basis=view.eta_basis,
        why=view.why,
        prompt_tokens=view.prompt_tokens,
        computed_tokens=view.computed_tokens,
        cached_tokens=view.cached_tokens,
        output_tokens=view.output_tokens,
        max_tokens=view.max_tokens,
        num_choices=view.num_choices,
        tokens_per_s=_rounded(view.tokens_per_s),
        kv_blocks=view.kv_blocks,
        num_preemptions=view.num_preemptions,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

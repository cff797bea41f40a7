"""Every answer has an id, which the log knows too: also pages, and what is at no path at all.

    GET /admin/usage ─▶ the client's x-request-id, or a new one ─▶ x-kvota-request-id
                                  │                              and x-request-id
                                  └─▶ `request_id(scope)`, for whoever logs

Endpoints that keep a record of their requests name them themselves (`proxy.new_call`), so their
streams do not pass through here. They answer whatever happens themselves, too, so unless a
middleware has to see them they are reached from here, without the application's layers between.
"""

from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvota.edge.arrival import client_id, id_headers

_KEY: Final = "kvota.request_id"


def request_id(scope: Scope) -> str | None:
    """The id of a request that came through `NamedAnswers`."""
    name: str | None = scope.get(_KEY)
    return name


class NamedAnswers:
    """`recorded`: what answers a POST of these paths; straight from here if `is_direct`."""

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        recorded: Mapping[str, ASGIApp],
        *,
        is_direct: bool,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._recorded = recorded if is_direct else dict.fromkeys(recorded, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        recorded = self._recorded.get(scope["path"]) if scope["method"] == "POST" else None
        if recorded is not None:
            await recorded(scope, receive, send)
            return
        name = scope[_KEY] = client_id(dict(scope["headers"])) or self._new_id()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *id_headers(name)]}
            await send(message)

        await self._app(scope, receive, send_named)

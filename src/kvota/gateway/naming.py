"""Every answer has an id, which the log knows too: also pages, and what is at no path at all.

    GET /admin/usage ─▶ the client's x-request-id, or a new one ─▶ x-kvota-request-id
                                  └─▶ `request_id(scope)`, for whoever logs

Endpoints that keep a record of their requests name them themselves (`proxy.new_call`), so their
streams do not pass through here.
"""

from collections.abc import Callable, Collection
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvota.edge.arrival import client_id

HEADER: Final = b"x-kvota-request-id"
_KEY: Final = "kvota.request_id"


def request_id(scope: Scope) -> str | None:
    """The id of a request that came through `NamedAnswers`."""
    name: str | None = scope.get(_KEY)
    return name


class NamedAnswers:
    """`name_themselves`: the paths whose POST is answered with an id already."""

    def __init__(
        self, app: ASGIApp, new_id: Callable[[], str], name_themselves: Collection[str]
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._name_themselves = frozenset(name_themselves)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (
            scope["method"] == "POST" and scope["path"] in self._name_themselves
        ):
            await self._app(scope, receive, send)
            return
        name = scope[_KEY] = client_id(dict(scope["headers"])) or self._new_id()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, name.encode())]}
            await send(message)

        await self._app(scope, receive, send_named)

"""The shape of every HTTP application: node, encoder, gateway.

Every error is answered in OpenAI's form, a path means what it says, and pages of other origins may
call only where the operator allows it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from random import Random
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvota.core.errors import InvalidRequest, KvotaError
from kvota.edge.problems import ErrorPages

_EXPOSED: Final = (
    "retry-after",
    "x-should-retry",
    "x-request-id",
    "x-kvota-request-id",
    "x-kvota-queue-ms",
    "x-kvota-cached-tokens",
)

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def application(
    routes: Sequence[Route],
    chance: Random,
    *,
    cors_origins: Sequence[str] = (),
    exposed: Sequence[str] = (),
    lifespan: Lifespan | None = None,
) -> Starlette:
    """An application of these routes.

    `exposed` are headers of answers that pages of other origins may read, besides the usual ones;
    `chance` spreads the times to come back; `lifespan` is entered at the start and left at the end.
    """
    pages = ErrorPages(chance)
    app = Starlette(
        routes=routes,
        middleware=_cors(pages, cors_origins, exposed) if cors_origins else [],
        exception_handlers={
            HTTPException: pages.http,
            KvotaError: pages.known,
            Exception: pages.crash,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _cors(pages: ErrorPages, origins: Sequence[str], exposed: Sequence[str]) -> list[Middleware]:
    return [
        Middleware(
            _Cors,
            pages=pages,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[*_EXPOSED, *exposed],
        )
    ]


class _Cors(CORSMiddleware):
    """Starlette's, which would refuse a preflight in plain text."""

    def __init__(self, app: ASGIApp, /, *, pages: ErrorPages, **options: Any) -> None:
        super().__init__(app, **options)
        self._pages = pages

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == HTTPStatus.OK:
            return answer
        refused = self._pages.response(InvalidRequest(f"{bytes(answer.body).decode()}."))
        for name, value in answer.headers.items():
            refused.headers.setdefault(name, value)
        return refused

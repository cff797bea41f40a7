"""Requests that a proxy has forwarded: only they take the way through uvicorn's middleware."""

from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

FORWARDED: Final = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})


def apps(config: Config) -> tuple[ASGIApp, ASGIApp]:
    """The application, and the same for requests that have such a header."""
    outer: Any = config.loaded_app
    inner: Any = outer.app if isinstance(outer, ProxyHeadersMiddleware) else outer
    return inner, outer

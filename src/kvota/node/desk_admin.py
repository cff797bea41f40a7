"""The desk's limits over HTTP: read them, and change them while the server works.

    GET /admin/desk     every setting of the desk
    PUT /admin/desk     change the limits that are in the body; the answer is what is in force

For the operator, like everything under /admin. Changes last until the process ends; kvota.toml is
what the next one starts with.
"""

import dataclasses
from collections.abc import Callable, Mapping
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvota.core.errors import ConfigError, InvalidRequest, KvotaError
from kvota.desk.live_limits import LIVE
from kvota.desk.settings import DeskSettings
from kvota.edge.exchange import Exchange
from kvota.edge.problems import error_headers, error_response
from kvota.node.settings import HttpSettings

COUNT_MAX: Final = 1_000_000


class DeskChange(msgspec.Struct, kw_only=True):
    """Limits to change; those that are absent or null stay. Any other setting is refused."""

    max_running_requests: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None
    max_waiting_queue: Annotated[int, Meta(ge=0, le=COUNT_MAX)] | None = None
    long_request_concurrency: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None


class DeskAdmin:
    """`change` makes the desk go by other settings, or raises ConfigError.

    `running_max` is what the engine was built for: the desk cannot let in more.
    """

    def __init__(
        self,
        settings: Callable[[], DeskSettings],
        change: Callable[[DeskSettings], None],
        *,
        running_max: int,
    ) -> None:
        self._settings = settings
        self._change = change
        self._running_max = running_max

    def read(self) -> dict[str, Any]:
        """All settings in force, by their names in kvota.toml."""
        return _plain(self._settings())

    def put(self, wanted: Mapping[str, object]) -> dict[str, Any]:
        """Change what is wanted. Raises InvalidRequest that names the field."""
        change = _read(wanted)
        limits = {name: value for name in LIVE if (value := getattr(change, name)) is not None}
        self._check_engine(limits.get("max_running_requests"))
        try:
            self._change(dataclasses.replace(self._settings(), **limits))
        except ConfigError as error:
            raise InvalidRequest(error.message, param=next(iter(limits), None)) from error
        return self.read()

    def _check_engine(self, wanted: int | None) -> None:
        if wanted is not None and wanted > self._running_max:
            raise InvalidRequest(
                f"`max_running_requests` is {wanted}; the engine was started for at most "
                f"{self._running_max}. Restart with a higher setting to go above.",
                param="max_running_requests",
            )


class DeskEndpoint:
    """An ASGI application for PUT /admin/desk."""

    def __init__(self, admin: DeskAdmin, settings: HttpSettings, chance: Random) -> None:
        self._admin = admin
        self._settings = settings
        self._chance = chance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings)
        try:
            in_force = self._admin.put(_object(await exchange.body()))
            await exchange.send_whole(200, msgspec.json.encode(in_force))
        except KvotaError as error:
            if not exchange.is_gone:
                headers = error_headers(error, self._chance)
                await exchange.respond(error.status, error_response(error), headers)


def desk_routes(admin: DeskAdmin, settings: HttpSettings, chance: Random) -> list[Route]:
    """Both methods of /admin/desk."""

    async def read(request: HttpRequest) -> Response:
        return Response(msgspec.json.encode(admin.read()), media_type="application/json")

    return [
        Route("/admin/desk", read, methods=["GET"]),
        Route("/admin/desk", DeskEndpoint(admin, settings, chance), methods=["PUT"]),
    ]


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body must be a JSON object: {error}.") from None


def _read(wanted: Mapping[str, object]) -> DeskChange:
    for name in wanted:
        if name not in LIVE:
            raise InvalidRequest(
                f"`{name[:64]}` cannot be changed while the server runs; {', '.join(LIVE)} can.",
                param=name[:64],
            )
    try:
        return msgspec.convert(wanted, DeskChange)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`")
        raise InvalidRequest(f"`{param}` is not valid: {what}.", param=param) from error


def _plain(settings: DeskSettings) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(dataclasses.asdict(settings))
    return plain

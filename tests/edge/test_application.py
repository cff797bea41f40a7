from random import Random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvota.core.errors import InvalidRequest
from kvota.edge.application import application

OURS, OTHERS = "https://ours.example", "https://others.example"


async def _works(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


async def _refuses(request: Request) -> PlainTextResponse:
    raise InvalidRequest("No.", param="p")


async def _breaks(request: Request) -> PlainTextResponse:
    raise RuntimeError("a bug")


ROUTES = [Route("/works", _works), Route("/refuses", _refuses), Route("/breaks", _breaks)]


async def ask(app: Starlette, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=transport, base_url="http://kvota") as client:
        return await client.request(method, path, headers=named)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nowhere", 404, {"code": "not_found"}),
        ("/works/", 404, {"code": "not_found"}),
        ("/refuses", 400, {"message": "No.", "param": "p", "code": "invalid_request"}),
        ("/breaks", 500, {"type": "server_error"}),
    ],
)
async def test_every_error_is_told_in_one_form(path: str, status: int, said: Any) -> None:
    reply = await ask(application(ROUTES, Random(1)), path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error.items() >= said.items()
    assert "a bug" not in reply.text


async def test_pages_of_an_allowed_origin_may_call_and_read_what_is_exposed() -> None:
    app = application(ROUTES, Random(1), cors_origins=[OURS], exposed=["x-own"])
    preflight = {"access_control_request_method": "POST", "access_control_request_headers": "x"}
    asked = await ask(app, "/works", "OPTIONS", origin=OURS, **preflight)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, OURS)
    answer = await ask(app, "/refuses", origin=OURS)
    assert answer.headers["access-control-allow-origin"] == OURS
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "x-kvota-request-id", "x-own"} <= set(exposed)
    stranger = await ask(app, "/works", origin=OTHERS)
    assert "access-control-allow-origin" not in stranger.headers


async def test_a_preflight_that_is_refused_is_told_in_the_same_form() -> None:
    app = application(ROUTES, Random(1), cors_origins=[OURS])
    preflight = {"access_control_request_method": "POST", "access_control_request_headers": "x"}
    for origin, method in ((OTHERS, "POST"), (OURS, "PUT")):
        asked = {**preflight, "access_control_request_method": method}
        reply = await ask(app, "/works", "OPTIONS", origin=origin, **asked)
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert "Origin" in reply.headers["vary"]
        assert ("access-control-allow-origin" in reply.headers) == (origin == OURS)


async def test_without_a_word_of_the_operator_no_origin_is_allowed() -> None:
    answer = await ask(application(ROUTES, Random(1)), "/works", origin=OURS)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers

"""The desk's limits over HTTP, on a whole node."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvota.desk.settings import DeskSettings
from tests.support.asgi_caller import Caller
from tests.support.http import make_node
from tests.support.live_node import LiveNode, until

PATH = "/admin/desk"


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    node = LiveNode(max_running_requests=4, max_waiting_queue=9)
    yield node
    node.stop()


def put(node: LiveNode, content: object) -> httpx.Response:
    url = f"http://127.0.0.1:{node.port}{PATH}"
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.put(url, content=body, trust_env=False, timeout=60)


def desk(node: LiveNode) -> dict[str, Any]:
    url = f"http://127.0.0.1:{node.port}{PATH}"
    return dict(httpx.get(url, trust_env=False, timeout=60).json())


def test_every_setting_can_be_read(node: LiveNode) -> None:
    seen = desk(node)
    assert set(seen) == set(DeskSettings.__dataclass_fields__)
    assert (seen["max_running_requests"], seen["max_waiting_queue"]) == (4, 9)
    assert seen["admission"] == "forecast"


def test_what_is_put_is_in_force_and_the_rest_stays(node: LiveNode) -> None:
    before = desk(node)
    reply = put(node, {"max_running_requests": 2, "max_waiting_queue": 0})
    assert reply.status_code == 200
    assert reply.json() == before | {"max_running_requests": 2, "max_waiting_queue": 0}
    assert desk(node) == reply.json()
    assert put(node, {"max_waiting_queue": 9, "max_running_requests": None}).status_code == 200
    assert desk(node) == before | {"max_running_requests": 2}
    put(node, {"max_running_requests": 4})


def test_lower_limits_refuse_who_comes_and_higher_ones_let_them_in(node: LiveNode) -> None:
    put(node, {"max_running_requests": 1, "max_waiting_queue": 1})
    with ThreadPoolExecutor(2) as threads, node.stage.held():
        running = threads.submit(node.complete, "first", max_tokens=3)
        until(lambda: node.num_open == 1, "one request at the desk")
        waiting = threads.submit(node.complete, "second", max_tokens=3)
        until(lambda: node.num_open == 2, "two requests at the desk")
        refused = node.complete("third")
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        put(node, {"max_running_requests": 2})
        until(lambda: desk_running(node) == 2, "the second to begin")
        node.stage.gate.open()
        assert [one.result(20).status for one in (running, waiting)] == [200, 200]
    put(node, {"max_running_requests": 4, "max_waiting_queue": 9})


def desk_running(node: LiveNode) -> float:
    page = httpx.get(f"http://127.0.0.1:{node.port}/metrics", trust_env=False, timeout=60).text
    [line] = [one for one in page.splitlines() if one.startswith('kvota_requests_running{lane="sh')]
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        ({"risk": 3}, "risk", "cannot be changed while the server runs"),
        ({"max_runing": 3}, "max_runing", "max_running_requests"),
        ({"max_running_requests": 0}, "max_running_requests", ">= 1"),
        ({"max_waiting_queue": -1}, "max_waiting_queue", ">= 0"),
        ({"max_waiting_queue": "5"}, "max_waiting_queue", "int"),
        ({"max_waiting_queue": 1.5}, "max_waiting_queue", "int"),
        ({"max_running_requests": 5}, "max_running_requests", "started for at most 4"),
        ([], None, "JSON object"),
        (b"{", None, "JSON object"),
        (b'{"max_waiting_queue": NaN}', None, "JSON object"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    node: LiveNode, content: object, param: str | None, says: str
) -> None:
    before = desk(node)
    reply = put(node, content)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert says in error["message"]
    assert desk(node) == before


async def test_an_application_without_a_desk_has_no_such_path() -> None:
    reply = await Caller(make_node().app).request("GET", PATH, None, {})
    assert reply.status == 404

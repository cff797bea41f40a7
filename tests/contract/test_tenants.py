"""Whose request it is: what a key says, all the way to the node and back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvota.core.request import Band
from kvota.gateway.store.database import open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, NewKey
from tests.support.gateway_node import GatewayNode, gateway_node
from tests.support.http_client import CHAT, Reply
from tests.support.live_node import until

TENANTS = {"one": "team a", "two": "研究"}


@pytest.fixture(scope="module")
def node() -> Iterator[GatewayNode]:
    with gateway_node(max_running_requests=8) as made:
        yield made


def key(node: GatewayNode, **fields: Any) -> str:
    gateway = node.gateway
    assert gateway.settings.state_dir is not None
    database = open_database(sqlite_url(Path(gateway.settings.state_dir) / "kvota.db"), KEY_TABLES)
    _, made = KeyStore(database).create(NewKey(**fields), 1.0)
    database.close()
    gateway.parts.door.refresh()
    return f"Bearer {made}"


def seen(reply: Reply) -> set[str]:
    return {request["client_id"] for request in reply.json["data"]}


def test_what_a_key_says_reaches_the_node_and_what_a_client_says_does_not(
    node: GatewayNode,
) -> None:
    keys = {id_: key(node, tenant=tenant) for id_, tenant in TENANTS.items()}
    keys["three"] = key(node, tenant="slow", band_max=Band.BATCH)
    admin = key(node, tenant="operator", is_admin=True)
    node.stage.step_s = 0.02
    body = node.chat_body(max_tokens=900, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(
                node.post, CHAT, body, authorization=bearer, x_request_id=id_,
                x_kvota_tenant="forged", x_kvota_priority="interactive",
            )
            for id_, bearer in keys.items()
        ]  # fmt: skip
        until(lambda: node.num_open == len(keys), "all to be accepted")
        views = node.get("/admin/requests", authorization=admin).json["data"]
        told = {view["client_id"]: (view["tenant"], view["band"]) for view in views}
        assert told == {
            "one": ("team a", "interactive"),
            "two": ("研究", "interactive"),
            "three": ("slow", "batch"),
        }
        assert seen(node.get("/v1/requests", authorization=keys["two"])) == {"two"}
        assert node.get("/admin/requests", authorization=keys["two"]).status == 403
        foreign = node.http.delete("/v1/requests/one", headers={"authorization": keys["two"]})
        assert foreign.status_code == 404
        for id_, bearer in keys.items():
            ended = node.http.delete(f"/v1/requests/{id_}", headers={"authorization": bearer})
            assert ended.status_code == 200
        for call in calls:
            assert call.result().error["code"] == "request_cancelled"
    node.wait_idle()


def test_the_nodes_report_of_tokens_stays_between_the_two(node: GatewayNode) -> None:
    node.stage.reset()
    bearer = key(node, tenant="t")
    for stream in (False, True):
        body = node.chat_body(max_tokens=5, stream=stream)
        reply = node.post(CHAT, body, authorization=bearer)
        assert reply.status == 200
        assert "x-kvota-usage" not in reply.headers
        assert b": usage" not in reply.content
    until(lambda: len(lines_of(node, "t")) == 2, "one line for each request")
    assert all('"output_tokens": 5' in line for line in lines_of(node, "t"))


def lines_of(node: GatewayNode, tenant: str) -> list[str]:
    return [line for line in node.log.splitlines() if f'"tenant": "{tenant}"' in line]

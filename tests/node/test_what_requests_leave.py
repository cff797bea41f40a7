"""What a request held goes when it ends, and not when the collector looks next.

A body may be megabytes in a few objects, and the collector counts objects: cycles that hold bodies
pile up to gigabytes before it looks.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from kvota.core.errors import BackendFailed, Outcome, Refusal, Refused
from kvota.core.request import Request
from kvota.edge.exchange import Exchange
from kvota.node.intake import Prepared
from kvota.wire.openai import ChatRequest, CompletionRequest
from tests.support.http import Node, fails, make_node, says, tiny_served

HELD = (ChatRequest, CompletionRequest, Prepared, Request, Exchange)
BROKEN = BackendFailed("The engine broke.")


def held() -> dict[int, str]:
    return {id(one): type(one).__name__ for one in gc.get_objects() if isinstance(one, HELD)}


@pytest.fixture(autouse=True)
def others() -> Iterator[dict[int, str]]:
    """What other tests hold. Nothing is collected from here on."""
    gc.collect()
    gc.disable()
    yield held()
    gc.enable()


def assert_nothing_is_held(node: Node, others: dict[int, str]) -> None:
    node.runner.streams.clear()  # the test's own
    assert held().items() <= others.items()


def full() -> Node:
    node = make_node(says("a"))
    node.runner.refusal = Refused(Refusal.QUEUE_FULL, "Full.", retry_after_s=1)
    node.runner.room = 0
    return node


@pytest.mark.parametrize(
    ("node", "fields", "status"),
    [
        (lambda: make_node(says("a", "b")), {}, 200),
        (lambda: make_node(says("a", "b")), {"stream": True}, 200),
        (lambda: make_node(), {"temperature": "hot"}, 400),
        (lambda: make_node(), {"temperature": -1}, 400),
        (lambda: make_node(), {"max_tokens": 10_000}, 400),
        (lambda: make_node(), {"model": "another"}, 404),
        (lambda: make_node(), {"response_format": {"type": "json_schema"}}, 400),
        (lambda: make_node(says("a"), served=tiny_served(max_model_len=2)), {}, 400),
        (lambda: make_node(fails(BROKEN, Outcome.ENGINE_ERROR)), {}, 502),
        (lambda: make_node(fails(BROKEN, Outcome.ENGINE_ERROR)), {"stream": True}, 502),
        (lambda: make_node(fails(BROKEN, Outcome.ENGINE_ERROR, "a")), {"stream": True}, 200),
        (full, {}, 503),
    ],
)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_nothing_is_left_of_a_request(
    others: dict[int, str], node: Any, path: str, fields: dict[str, Any], status: int
) -> None:
    made: Node = node()
    reply = await getattr(made, path)("hello", **fields)
    assert reply.status == status, reply.content
    del reply
    assert_nothing_is_held(made, others)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_nothing_is_left_of_a_request_whose_client_has_left(
    others: dict[int, str], is_stream: bool
) -> None:
    node = make_node()
    call = node.caller.begin(
        "POST", "/v1/completions", {"model": "tiny", "prompt": "hi", "stream": is_stream}
    )
    await node.runner.submitted()
    call.leave()
    await call.end()
    del call
    assert_nothing_is_held(node, others)

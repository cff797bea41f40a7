"""/v1/embeddings over ASGI, with an encoder whose passes are in the test's hands."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from kvota.core.errors import Outcome
from tests.support.embedding_node import MODEL, PATH, POISON, VOCAB, embedding_node


async def test_a_text_comes_back_as_a_vector() -> None:
    async with embedding_node() as node:
        reply = await node.post("three little words")
        assert reply.status == 200
        assert reply.json == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [5.0, 3.0]}],
            "model": MODEL,
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        (["a bb", "ccc"], [[1.0, 2.0], [3.0, 1.0]]),
        ([7, 8, 9], [[7.0, 3.0]]),
        ([[7, 8], [9]], [[7.0, 2.0], [9.0, 1.0]]),
    ],
)
async def test_every_form_of_input_is_taken_in_order(given: Any, vectors: Any) -> None:
    async with embedding_node() as node:
        body = (await node.post(given)).json
        assert [one["embedding"] for one in body["data"]] == vectors
        assert [one["index"] for one in body["data"]] == list(range(len(vectors)))


async def test_base64_holds_the_same_floats() -> None:
    async with embedding_node() as node:
        body = (await node.post("a bb", encoding_format="base64")).json
        packed = base64.b64decode(body["data"][0]["embedding"])
        assert np.frombuffer(packed, "<f4").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"input": None}, 400, "invalid_request", "input"),
        ({"input": []}, 400, "invalid_request", "input"),
        ({"input": ""}, 400, "invalid_request", "input"),
        ({"input": ["a", ""]}, 400, "invalid_request", "input"),
        ({"input": [[]]}, 400, "invalid_request", "input"),
        ({"input": [1, "a"]}, 400, "invalid_request", "input"),
        ({"input": [True]}, 400, "invalid_request", "input"),
        ({"input": [VOCAB]}, 400, "invalid_request", "input"),
        ({"input": [-1]}, 400, "invalid_request", "input"),
        ({"input": {"a": 1}}, 400, "invalid_request", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_request", "input"),
        ({"input": "a " * 17}, 400, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 1}, 400, "invalid_request", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "invalid_request", "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "model_not_found", "model"),
        ({"input": "a", "model": None}, 400, "invalid_request", "model"),
    ],
)
async def test_bad_input_never_reaches_the_model(
    fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with embedding_node() as node:
        reply = await node.caller.request("POST", PATH, {"model": MODEL, **fields})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
        assert node.passes.batches == []
        assert [one.outcome for one in node.records] == [Outcome.INVALID]


async def test_texts_that_wait_together_are_computed_together() -> None:
    async with embedding_node(is_open=False) as node:
        first = asyncio.create_task(node.post([1, 1]))
        await node.begun()
        others = [asyncio.create_task(node.post([number, 1])) for number in range(2, 7)]
        await node.in_line(5)
        node.passes.gate.set()
        replies = await asyncio.gather(first, *others)
        assert [reply.json["data"][0]["embedding"][0] for reply in replies] == [1, 2, 3, 4, 5, 6]
        assert [len(batch) for batch in node.passes.batches] == [1, 5]
        page = (await node.caller.request("GET", "/metrics")).content.decode()
        assert "kvota_embedding_batch_size_sum 6.0" in page
        assert "kvota_embedding_batch_size_count 2.0" in page


async def test_a_full_line_is_a_503_with_a_time_to_come_back() -> None:
    async with embedding_node(is_open=False, line={"max_waiting_tokens": 10}) as node:
        running = asyncio.create_task(node.post([1]))
        await node.begun()
        waiting = asyncio.create_task(node.post([2] * 8))
        await node.in_line(1)
        refused = await node.post([3] * 8)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        node.passes.gate.set()
        assert [(await one).status for one in (running, waiting)] == [200, 200]


async def test_who_waits_too_long_in_line_is_told() -> None:
    async with embedding_node(is_open=False, queue_timeout_s=1.0) as node:
        running = asyncio.create_task(node.post([1]))
        await node.begun()
        waiting = asyncio.create_task(node.post([2]))
        await node.in_line(1)
        await asyncio.sleep(1.1)
        node.passes.gate.set()
        assert (await running).status == 200
        late = await waiting
        assert (late.status, late.error["code"]) == (503, "queue_timeout")
        assert node.passes.batches == [[[1]]]


async def test_a_pass_that_outlasts_the_request_is_a_504() -> None:
    async with embedding_node(is_open=False, request_timeout_s=0.05) as node:
        reply = await node.post([1])
        assert (reply.status, reply.error["code"]) == (504, "request_timeout")


async def test_a_client_that_leaves_takes_its_texts_out_of_line() -> None:
    async with embedding_node(is_open=False) as node:
        running = asyncio.create_task(node.post([1]))
        await node.begun()
        async with node.caller.open(PATH, {"model": MODEL, "input": [2]}) as call:
            await node.in_line(1)
            call.leave()
            await node.in_line(0)
        node.passes.gate.set()
        await running
        assert node.passes.batches == [[[1]]]
        assert [one.outcome for one in node.records] == [Outcome.CLIENT_CLOSED, Outcome.COMPLETED]


async def test_a_failed_pass_fails_its_texts_and_nobody_else() -> None:
    async with embedding_node() as node:
        failed = await node.post([POISON])
        assert (failed.status, failed.error["code"]) == (502, "backend_error")
        assert "poisoned" not in failed.error["message"]
        assert node.observer.failures == 1
        assert (await node.post([1])).status == 200


async def test_draining_answers_what_was_taken_and_nothing_new() -> None:
    async with embedding_node(is_open=False) as node:
        running = asyncio.create_task(node.post([1]))
        await node.begun()
        drained = asyncio.create_task(node.embedder.drain(3.0))
        await asyncio.sleep(0)
        refused = await node.post([2])
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert (await node.caller.request("GET", "/ready")).status == 503
        assert not drained.done()
        node.passes.gate.set()
        assert (await running).status == 200
        await drained


async def test_models_and_health() -> None:
    async with embedding_node() as node:
        models = (await node.caller.request("GET", "/v1/models")).json
        assert [one["id"] for one in models["data"]] == [MODEL]
        assert (await node.caller.request("GET", f"/v1/models/{MODEL}")).status == 200
        assert (await node.caller.request("GET", "/v1/models/x")).error["code"] == "model_not_found"
        assert (await node.caller.request("GET", "/health")).status == 200
        assert (await node.caller.request("GET", "/ready")).status == 200

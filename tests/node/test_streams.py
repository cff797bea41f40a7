"""What happens when things do not go to plan: clients leave, engines fail, time passes."""

import asyncio
from typing import Any

import pytest

from kvota.core.errors import (
    BackendFailed,
    Outcome,
    Refusal,
    Refused,
    RequestTimeout,
)
from kvota.core.request import FinishReason
from kvota.node.ports import Waiting
from tests.support.asgi_caller import Caller
from tests.support.http import (
    MODEL,
    Node,
    delta,
    ended,
    fails,
    make_node,
    read,
    says,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SOON_S = 0.02


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def overload() -> Refused:
    return Refused(Refusal.QUEUE_FULL, "The line is full.", retry_after_s=7.0)


# --- failures


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "outcome", "status", "code"),
    [
        (BackendFailed("It broke."), Outcome.ENGINE_ERROR, 502, "backend_error"),
        (RequestTimeout("Too long."), Outcome.REQUEST_TIMEOUT, 504, "request_timeout"),
        (Refused(Refusal.QUEUE_TIMEOUT, "Waited too long.", retry_after_s=3.0),
         Outcome.QUEUE_TIMEOUT, 503, "queue_timeout"),
        (Refused(Refusal.DRAINING, "Going down.", retry_after_s=3.0),
         Outcome.SHUTDOWN, 503, "draining"),
    ],
)  # fmt: skip
async def test_a_failure_before_the_first_token_is_an_http_error(
    stream: bool, error: Any, outcome: Outcome, status: int, code: str
) -> None:
    node = make_node(fails(error, outcome))
    reply = await node.chat(stream=stream)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/json"
    [record] = node.records
    assert (record.outcome, record.status, record.code) == (outcome, status, code)


async def test_a_failure_after_the_prompt_was_read_is_still_an_http_error() -> None:
    node = make_node()
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    [stream] = await node.runner.submitted()
    stream.push(read(stream.request))
    error = BackendFailed("It broke.")
    stream.push(ended(stream.request, outcome=Outcome.ENGINE_ERROR, error=error))
    assert (await call.end()).status == 502


async def test_a_failure_after_tokens_is_an_error_event_and_no_done() -> None:
    node = make_node(fails(RequestTimeout("Too long."), Outcome.REQUEST_TIMEOUT, "a", "b", "c"))
    reply = await node.chat(stream=True)
    assert reply.status == 200
    assert reply.is_complete
    *chunks, last = reply.chunks
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abc"
    assert last == {
        "error": {
            "message": "Too long.",
            "type": "timeout_error",
            "param": None,
            "code": "request_timeout",
        }
    }
    assert "[DONE]" not in reply.events
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert node.records[0].outcome is Outcome.REQUEST_TIMEOUT


async def test_a_failure_after_tokens_without_a_stream_is_an_http_error() -> None:
    node = make_node(fails(RequestTimeout("Too long."), Outcome.REQUEST_TIMEOUT, "a"))
    assert (await node.chat()).status == 504


async def test_when_one_prompt_fails_the_others_are_cancelled() -> None:
    node = make_node()
    call = node.caller.begin("POST", COMPLETIONS, {"model": MODEL, "prompt": ["a", "b", "c"]})
    streams = await node.runner.submitted(3)
    error = BackendFailed("It broke.")
    request = streams[1].request
    streams[1].push(ended(request, outcome=Outcome.ENGINE_ERROR, error=error))
    assert (await call.end()).error["code"] == "backend_error"
    assert streams[0].is_cancelled
    assert streams[2].is_cancelled
    assert node.records[0].outcome is Outcome.ENGINE_ERROR


# --- refusals


@pytest.mark.parametrize("stream", [True, False])
async def test_overload_is_a_503_that_says_when_to_come_back(stream: bool) -> None:
    node = make_node(says("a"))
    node.runner.refusal = overload()
    reply = await node.chat(stream=stream)
    assert (reply.status, reply.error["code"]) == (503, "queue_full")
    assert reply.error["type"] == "overloaded_error"
    assert reply.headers["x-should-retry"] == "true"
    assert 5 <= int(reply.headers["retry-after"]) <= 9
    [record] = node.records
    assert (record.outcome, record.code, record.queued_s) == (Outcome.REFUSED, "queue_full", None)


async def test_those_refused_together_are_not_told_the_same_moment() -> None:
    node = make_node(says("a"))
    node.runner.refusal = Refused(Refusal.QUEUE_FULL, "Full.", retry_after_s=60.0)
    waits = {(await node.chat()).headers["retry-after"] for _ in range(20)}
    assert len(waits) > 5
    assert all(48 <= int(wait) <= 72 for wait in waits)


async def test_when_one_of_several_prompts_finds_no_room_none_of_them_runs() -> None:
    node = make_node()
    node.runner.refusal, node.runner.room = overload(), 2
    reply = await node.complete(["a", "b", "c"])
    assert reply.status == 503
    assert all(stream.is_cancelled for stream in node.runner.streams)


async def test_a_draining_node_closes_the_connection() -> None:
    node = make_node(says("a"))
    node.runner.refusal = Refused(Refusal.DRAINING, "Going down.", retry_after_s=9.0)
    reply = await node.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (503, "draining")
    assert reply.headers["connection"] == "close"


# --- clients that leave


@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        (CHAT, chat_body(), 1),
        (CHAT, chat_body(stream=True), 1),
        (COMPLETIONS, {"model": MODEL, "prompt": "a", "n": 3}, 1),
        (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b", "c"]}, 3),
        (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"], "stream": True}, 2),
    ],
)
async def test_work_stops_when_the_client_leaves_before_the_first_byte(
    path: str, body: dict[str, Any], num_requests: int
) -> None:
    node = make_node()
    call = node.caller.begin("POST", path, body)
    streams = await node.runner.submitted(num_requests)
    call.leave()
    reply = await call.end()
    assert all(stream.is_cancelled and stream.is_read_to_end for stream in streams)
    assert reply.status == 0, "nobody is told anything"
    [record] = node.records
    assert (record.outcome, record.status) == (Outcome.CLIENT_CLOSED, 499)


async def test_work_stops_when_the_client_leaves_a_stream() -> None:
    node = make_node()
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    [stream] = await node.runner.submitted()
    stream.push(read(stream.request), delta(stream.request, "a"))
    await call.until(lambda reply: b'"a"' in reply.content)
    call.leave()
    reply = await call.end()
    assert stream.is_cancelled
    assert not reply.is_complete
    assert node.records[0].outcome is Outcome.CLIENT_CLOSED


async def test_a_client_that_leaves_while_its_prompt_is_prepared_never_reaches_the_engine() -> None:
    node = make_node(says("a"))
    call = node.caller.begin("POST", CHAT, chat_body())
    call.leave()
    await call.end()
    assert all(stream.is_cancelled for stream in node.runner.streams)
    assert node.records[0].outcome is Outcome.CLIENT_CLOSED


async def test_a_client_that_leaves_while_sending_its_body_is_recorded() -> None:
    node = make_node(says("a"))
    call = node.caller.begin("POST", CHAT, b'{"model": ', is_whole=False)
    call.leave()
    reply = await call.end()
    assert reply.status == 0
    assert (node.records[0].outcome, node.records[0].status) == (Outcome.CLIENT_CLOSED, 499)


async def test_a_reader_that_stalls_is_cut_off() -> None:
    node = make_node(send_timeout_s=SOON_S)
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    [stream] = await node.runner.submitted()
    call.may_send.clear()
    stream.push(read(stream.request), delta(stream.request, "a"))
    await call.end()
    assert stream.is_cancelled
    assert stream.is_read_to_end
    [record] = node.records
    assert (record.outcome, record.status) == (Outcome.SLOW_READER, 499)


async def test_a_slow_reader_gets_fewer_longer_chunks_and_the_same_text() -> None:
    node = make_node()
    call = node.caller.begin("POST", CHAT, chat_body(stream=True, logprobs=True))
    [stream] = await node.runner.submitted()
    request = stream.request
    stream.push(read(request), delta(request, "0"))
    await call.until(lambda reply: len(reply.pieces) == 1)
    call.may_send.clear()
    stream.push(delta(request, "1"))
    await call.until_held()
    for number in range(2, 9):
        stream.push(delta(request, str(number)))
    stream.push(delta(request, "9", finish=FinishReason.STOP), ended(request, output=10))
    call.may_send.set()
    reply = await call.end()
    contents = [c["choices"][0]["delta"].get("content", "") for c in reply.chunks]
    assert "".join(contents) == "0123456789"
    assert len([text for text in contents if text]) == 3
    assert sum(len(c["choices"][0]["logprobs"]["content"]) for c in reply.chunks
               if c["choices"][0]["logprobs"]) == 10  # fmt: skip


async def test_events_of_one_step_go_out_in_one_write() -> None:
    reply = await make_node(says("a", "b", finish=FinishReason.LENGTH)).chat(n=8, stream=True)
    assert len(reply.chunks) == 8 * 4
    assert len(reply.pieces) < 20


# --- heartbeats


async def test_comments_bridge_the_wait_for_the_first_token() -> None:
    node = make_node(heartbeat_s=SOON_S)
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    [stream] = await node.runner.submitted()
    await call.until(lambda reply: reply.comments >= 3)
    assert call.reply.status == 200
    assert call.reply.content == b": heartbeat\n\n" * call.reply.comments
    request = stream.request
    stream.push(read(request), delta(request, "hello", finish=FinishReason.STOP))
    stream.push(ended(request, output=1))
    reply = await call.end()
    assert reply.events[-1] == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in reply.chunks) == "hello"


async def test_comments_bridge_a_silence_between_tokens() -> None:
    node = make_node(heartbeat_s=SOON_S)
    async with node.caller.open(CHAT, chat_body(stream=True)) as call:
        [stream] = await node.runner.submitted()
        stream.push(read(stream.request), delta(stream.request, "a"))
        await call.until(lambda reply: b'"a"' in reply.content and reply.pieces[-1][:1] == b":")


async def test_comments_tell_the_place_in_line_while_the_request_waits() -> None:
    node = make_node(heartbeat_s=SOON_S)
    async with node.caller.open(CHAT, chat_body(stream=True)) as call:
        [stream] = await node.runner.submitted()
        stream.place = Waiting(9, 39.5, "KV memory", latest_by="max_tokens")
        await call.until(lambda reply: reply.comments >= 1)
        stream.place = Waiting(position=3, eta_s=11.2, why="KV memory")
        await call.until(lambda reply: "queued position=3 eta_s=12" in reply.remarks)
        stream.place = Waiting(position=1, eta_s=None, why="its turn")
        await call.until(lambda reply: "queued position=1" in reply.remarks)
        stream.place = None
        await call.until(lambda reply: "heartbeat" in reply.remarks)
        stream.push(read(stream.request), delta(stream.request, "a"))
        await call.until(lambda reply: b'"a"' in reply.content and reply.pieces[-1][:1] == b":")
        assert list(dict.fromkeys(call.reply.remarks)) == [
            "queued position=9 eta_s=40 eta_basis=max_tokens",
            "queued position=3 eta_s=12",
            "queued position=1",
            "heartbeat",
        ]


async def test_of_several_prompts_the_first_in_line_is_told_until_one_is_served() -> None:
    node = make_node(heartbeat_s=SOON_S)
    body = {"model": MODEL, "prompt": ["a", "b"], "stream": True}
    async with node.caller.open(COMPLETIONS, body) as call:
        first, second = await node.runner.submitted(2)
        first.place = Waiting(position=5, eta_s=None, why="its turn")
        second.place = Waiting(position=4, eta_s=None, why="its turn")
        await call.until(lambda reply: "queued position=4" in reply.remarks)
        second.place = None
        await call.until(lambda reply: reply.remarks[-1:] == ["heartbeat"])
        assert "queued position=5" not in call.reply.remarks


async def test_nothing_is_sent_before_the_first_heartbeat() -> None:
    node = make_node(heartbeat_s=3600)
    async with node.caller.open(CHAT, chat_body(stream=True)) as call:
        [stream] = await node.runner.submitted()
        stream.push(read(stream.request))
        await asyncio.sleep(SOON_S)
        assert call.reply.status == 0


async def test_refusals_come_before_any_heartbeat() -> None:
    node = make_node(says("a"), heartbeat_s=1e-6)
    assert (await node.chat(stream=True, temperature=9)).status == 400
    node.runner.refusal = overload()
    assert (await node.chat(stream=True)).status == 503


async def test_a_failure_after_a_heartbeat_is_an_error_event() -> None:
    node = make_node(heartbeat_s=SOON_S)
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    [stream] = await node.runner.submitted()
    await call.until(lambda reply: reply.comments >= 1)
    stream.push(ended(stream.request, outcome=Outcome.QUEUE_TIMEOUT, error=overload()))
    reply = await call.end()
    assert [chunk["error"]["code"] for chunk in reply.chunks] == ["queue_full"]
    assert reply.is_complete
    assert node.records[0].outcome is Outcome.QUEUE_TIMEOUT


async def test_a_stalled_reader_is_noticed_by_a_heartbeat() -> None:
    node = make_node(heartbeat_s=SOON_S, send_timeout_s=SOON_S)
    call = node.caller.begin("POST", CHAT, chat_body(stream=True))
    call.may_send.clear()
    [stream] = await node.runner.submitted()
    await call.end()
    assert stream.is_cancelled
    assert node.records[0].outcome is Outcome.SLOW_READER


async def test_bodies_get_no_heartbeat() -> None:
    node = make_node(heartbeat_s=1e-3)
    call = node.caller.begin("POST", CHAT, chat_body())
    [stream] = await node.runner.submitted()
    await asyncio.sleep(SOON_S)
    assert call.reply.status == 0
    request = stream.request
    stream.push(read(request), delta(request, "a", finish=FinishReason.STOP))
    stream.push(ended(request, output=1))
    assert (await call.end()).status == 200


# --- records


async def test_each_request_leaves_one_record_whatever_its_end() -> None:
    node = make_node(says("a", "b", cached=16))
    await node.chat(n=2)
    await node.complete(temperature=9)
    await node.post(CHAT, b"{")
    await node.chat(model="x" * 1000)
    node.runner.refusal = overload()
    await node.chat()
    outcomes = [record.outcome for record in node.records]
    assert outcomes == [Outcome.COMPLETED, *3 * [Outcome.INVALID], Outcome.REFUSED]
    first = node.records[0]
    assert (first.model, first.endpoint, first.num_choices) == (MODEL, "chat.completions", 2)
    assert (first.cached_tokens, first.output_tokens, first.queued_s) == (16, 4, 0.25)
    assert first.read_tokens == first.prompt_tokens > 0
    assert (first.first_token_s, first.time_per_output_token_s) == (0.5, 1.0)
    assert {record.model for record in node.records[1:4]} == {"unknown"}


async def test_a_prompt_that_was_never_read_is_not_recorded_as_read() -> None:
    node = make_node()
    call = node.caller.begin("POST", CHAT, chat_body())
    [stream] = await node.runner.submitted()
    stream.push(ended(stream.request, outcome=Outcome.QUEUE_TIMEOUT, error=overload()))
    await call.end()
    [record] = node.records
    assert record.prompt_tokens > 0
    assert record.read_tokens == 0


async def test_a_request_that_is_cut_by_shutdown_is_recorded_and_cancelled() -> None:
    node = make_node()
    call = node.caller.begin("POST", CHAT, chat_body())
    [stream] = await node.runner.submitted()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    assert stream.is_cancelled
    assert node.records[0].outcome is Outcome.SHUTDOWN


async def test_a_bug_of_ours_is_a_500_without_details_and_is_recorded() -> None:
    def broken(request: Any) -> Any:
        raise RuntimeError("secret detail")

    node = make_node()
    node.runner.submit = broken  # type: ignore[method-assign]
    call = node.caller.begin("POST", CHAT, chat_body())
    with pytest.raises(RuntimeError):  # for the server's log
        await call.end()
    assert (call.reply.status, call.reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in call.reply.content
    assert (node.records[0].outcome, node.records[0].status) == (Outcome.ENGINE_ERROR, 500)


# --- ids


async def test_the_clients_request_id_is_echoed_and_ours_stay_unique() -> None:
    node = make_node(says("a"))
    replies = [await node.post(CHAT, chat_body(stream=True), x_request_id="same") for _ in "ab"]
    for name in ("x-kvota-request-id", "x-request-id"):  # the official SDKs read the second
        assert [reply.headers[name] for reply in replies] == ["same", "same"]
    ids = [request.id for request in node.runner.requests]
    assert len(set(ids)) == 2
    assert [record.request_id for record in node.records] == ["same", "same"]
    assert node.runner.requests[0].labels["client_id"] == "same"


async def test_two_live_requests_with_one_id_both_get_their_own_answer() -> None:
    node = make_node()
    calls = [
        node.caller.begin("POST", CHAT, chat_body(stream=True), {"x-request-id": "same"})
        for _ in range(2)
    ]
    for number, stream in enumerate(await node.runner.submitted(2)):
        request = stream.request
        stream.push(read(request), delta(request, str(number), finish=FinishReason.STOP))
        stream.push(ended(request, output=1))
    texts = {(await call.end()).chunks[1]["choices"][0]["delta"]["content"] for call in calls}
    assert texts == {"0", "1"}


async def test_a_giant_or_strange_id_is_cut_and_cleaned() -> None:
    node = make_node(says("a"))
    reply = await node.post(
        CHAT, chat_body(stream=True), x_request_id="a b\x7f\xe9" + "c" * 100_000
    )
    assert reply.headers["x-kvota-request-id"] == "ab" + "c" * 126
    assert max(len(event) for event in reply.events) < 400
    reply = await node.post(CHAT, chat_body(), x_request_id="\xe9\xe9")
    assert len(reply.headers["x-kvota-request-id"]) == 24


async def test_without_an_id_one_is_made_up() -> None:
    node: Node = make_node(says("a"))
    caller: Caller = node.caller
    replies = [await caller.request("POST", CHAT, chat_body()) for _ in "ab"]
    assert len({reply.headers["x-kvota-request-id"] for reply in replies}) == 2

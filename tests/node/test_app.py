"""Everything around generation: paths, methods, bodies, health, models, CORS, tokenizing."""

from typing import Any

import pytest

from kvota.node.ports import RunnerState
from kvota.node.texts import DETOKENIZED_MIN
from tests.support.http import DRAIN_TIMEOUT_S, LOAD_S, MODEL, make_node, says, tiny_served
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("POST", CHAT, b"{", {}, 400, "invalid_request"),
        ("POST", CHAT, b'{"temperature": NaN}', {}, 400, "invalid_request"),
        ("POST", CHAT, b"", {}, 400, "invalid_request"),
        ("POST", CHAT, {"messages": BODY["messages"]}, {}, 400, "invalid_request"),
        ("POST", CHAT, {**BODY, "model": "other"}, {}, 404, "model_not_found"),
        ("GET", CHAT, None, {}, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, {}, 405, "method_not_allowed"),
        ("PUT", "/health", None, {}, 405, "method_not_allowed"),
        ("GET", "/nothing/here", None, {}, 404, "not_found"),
        ("POST", "/v1/unknown", BODY, {}, 404, "not_found"),
        ("GET", "/v1/models/other", None, {}, 404, "model_not_found"),
        ("GET", "/health/", None, {}, 404, "not_found"),
        ("POST", CHAT, BODY, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", CHAT, BODY, {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ("POST", CHAT, b" " * 5000, {}, 413, "body_too_large"),
        ("POST", "/tokenize", b" " * 5000, {}, 413, "body_too_large"),
        ("POST", "/tokenize", b"[]", {}, 400, "invalid_request"),
        ("POST", "/tokenize", {"prompt": "a"}, {"content-type": "text/xml"}, 415,
         "unsupported_media_type"),
    ],
)  # fmt: skip
async def test_every_error_has_openais_form(
    method: str, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    node = make_node(says("x"), max_body_bytes=4096)
    reply = await node.caller.request(method, path, body, headers)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-should-retry"] == "false"
    assert (await node.chat()).status == 200


async def test_a_405_says_what_is_allowed() -> None:
    reply = await make_node().get(CHAT)
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "Application/JSON; charset=utf-8"]
)
async def test_json_and_no_content_type_are_read(content_type: str) -> None:
    node = make_node(says("x"))
    assert (await node.post(CHAT, BODY, **{"content-type": content_type})).status == 200


async def test_a_body_in_parts_is_counted_while_it_is_read() -> None:
    node = make_node(says("x"), max_body_bytes=4096)
    call = node.caller.begin("POST", CHAT, [b" " * 3000] * 2, is_whole=False)
    assert (await call.end()).status == 413


async def test_a_body_that_declares_too_much_is_refused_unread() -> None:
    node = make_node(says("x"), max_body_bytes=4096)
    call = node.caller.begin("POST", CHAT, b"{", {"content-length": "5000"}, is_whole=False)
    assert (await call.end()).status == 413


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    node = make_node(says("x"), body_timeout_s=0.02)
    call = node.caller.begin("POST", CHAT, b"{", is_whole=False)
    assert (await call.end()).status == 400


# --- health


async def test_health_says_that_the_process_is_alive_and_nothing_else() -> None:
    node = make_node()
    node.runner.state = RunnerState.DEAD
    reply = await node.get("/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    assert (await node.caller.request("HEAD", "/health")).status == 200


async def test_ready_while_work_would_be_accepted() -> None:
    assert (await make_node().get("/ready")).status == 200


@pytest.mark.parametrize(
    ("state", "code", "retry_after_s"),
    [
        (RunnerState.STARTING, "engine_restarting", LOAD_S),
        (RunnerState.DRAINING, "draining", LOAD_S + DRAIN_TIMEOUT_S),
        (RunnerState.DEAD, "engine_restarting", LOAD_S),
    ],
)
async def test_not_ready_while_the_engine_does_not_run(
    state: RunnerState, code: str, retry_after_s: float
) -> None:
    node = make_node()
    node.runner.state = state
    reply = await node.get("/ready")
    assert (reply.status, reply.error["code"]) == (503, code)
    assert int(reply.headers["retry-after"]) == pytest.approx(retry_after_s, rel=0.21)


async def test_not_ready_while_the_engine_is_stuck_and_ready_again_after() -> None:
    node = make_node()
    node.runner.stuck = True
    reply = await node.get("/ready")
    assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
    assert int(reply.headers["retry-after"]) == pytest.approx(LOAD_S, rel=0.21)
    node.runner.stuck = False
    assert (await node.get("/ready")).status == 200


async def test_while_the_model_loads_the_node_answers_and_is_not_ready() -> None:
    node = make_node(loading=True)
    for path in ("/ready", "/v1/models", "/tokenizer_info"):
        assert (await node.get(path)).status == 503
    assert (await node.chat()).status == 503
    assert (await node.post("/tokenize", {"prompt": "a"})).status == 503
    assert (await node.get("/health")).status == 200


async def test_metrics_are_in_prometheus_format() -> None:
    reply = await make_node().get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert reply.content == b"kvota_up 1\n"


# --- models


async def test_models_are_listed_under_all_their_names() -> None:
    node = make_node()
    listed = (await node.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [MODEL, "also-tiny"]
    for card in listed["data"]:
        assert set(card) >= {"id", "object", "created", "owned_by"}
        assert (await node.get(f"/v1/models/{card['id']}")).json == card


async def test_a_models_name_may_hold_slashes() -> None:
    node = make_node(served=tiny_served(name="org/model"))
    assert (await node.get("/v1/models/org/model")).json["id"] == "org/model"


# --- CORS

ORIGIN = "https://page.example"
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-kvota-priority",
}


async def test_a_page_of_an_allowed_origin_may_call() -> None:
    node = make_node(says("x"), cors_origins=(ORIGIN,))
    reply = await node.caller.request("OPTIONS", CHAT, None, {"origin": ORIGIN, **ASK})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in reply.headers["access-control-allow-headers"]
    reply = await node.post(CHAT, b"{", origin=ORIGIN)
    assert reply.status == 400
    assert reply.headers["access-control-allow-origin"] == ORIGIN, "the page can read the error"
    assert "x-kvota-request-id" in reply.headers["access-control-expose-headers"]


async def test_a_page_of_another_origin_may_not() -> None:
    node = make_node(says("x"), cors_origins=(ORIGIN,))
    other = {"origin": "https://other.example"}
    preflight = await node.caller.request("OPTIONS", CHAT, None, {**other, **ASK})
    reply = await node.post(CHAT, BODY, **other)
    for answer in (preflight, reply):
        assert "access-control-allow-origin" not in answer.headers


async def test_without_the_setting_there_is_no_cors() -> None:
    node = make_node(says("x"))
    reply = await node.post(CHAT, BODY, origin=ORIGIN)
    assert "access-control-allow-origin" not in reply.headers
    assert (await node.caller.request("OPTIONS", CHAT)).status == 405


# --- tokenizing


async def test_a_prompt_is_tokenized_and_comes_back() -> None:
    node = make_node()
    body = (await node.post("/tokenize", {"prompt": " the é", "return_token_strs": True})).json
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 256
    assert body["tokens"] == node.served.tokenizer.encode(" the é")
    back = await node.post("/detokenize", {"model": MODEL, "tokens": body["tokens"]})
    assert back.json == {"prompt": " the é"}


async def test_many_tokens_are_written_as_text_beside_the_event_loop() -> None:
    node = make_node(inline_characters_max=3)
    ids = node.served.tokenizer.encode("the text")
    assert (await node.post("/detokenize", {"tokens": ids})).json == {"prompt": "the text"}
    names = {"prompt": "the text", "return_token_strs": True}
    told = (await node.post("/tokenize", names)).json["token_strs"]
    assert told == [node.served.tokenizer.token_text(token) for token in ids]


async def test_more_tokens_than_any_context_holds_are_not_written_as_text() -> None:
    node = make_node()
    [token] = node.served.tokenizer.encode("x")
    assert (await node.post("/detokenize", {"tokens": [token] * DETOKENIZED_MIN})).status == 200
    reply = await node.post("/detokenize", {"tokens": [token] * (DETOKENIZED_MIN + 1)})
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    assert "131073 ids; at most 131072" in reply.error["message"]


async def test_messages_are_tokenized_exactly_as_chat_reads_them() -> None:
    node = make_node(says("x"))
    await node.chat("hello")
    [request] = node.runner.requests
    messages = [{"role": "user", "content": "hello"}]
    body = (await node.post("/tokenize", {"messages": messages})).json
    assert body["tokens"] == list(request.prompt)
    assert body["token_strs"] is None


async def test_long_prompts_are_tokenized_away_from_the_event_loop() -> None:
    node = make_node(served=tiny_served(max_model_len=200_000), inline_characters_max=10)
    text = "long " * 1000
    body = (await node.post("/tokenize", {"prompt": text})).json
    assert body["tokens"] == node.served.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": [USER], "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"messages": [USER], "documents": [{"text": "a"}]}, "documents"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        (
            "/tokenize",
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(
    path: str, body: dict[str, Any], param: str
) -> None:
    reply = await make_node().post(path, body)
    assert reply.status in (400, 404)
    assert reply.error["param"] == param


async def test_an_evaluation_client_finds_what_it_probes_for() -> None:
    node = make_node()
    facts = (await node.get("/tokenizer_info")).json
    assert facts["eos_token"] == "<|im_end|>"
    body = await node.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert body.json["tokens"] == byte_ids("hi")

"""Streams against bodies: the same text, the same ending, nothing half-said."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.http_client import CHAT, COMPLETIONS, Reply, joined_text
from tests.support.live_node import LiveNode, live_node, until
from tests.support.stage import Play, by_prompt, emits, says
from tests.support.tiny_tokenizer import FIRST_BYTE_ID, byte_ids

END = "<<END>>"


def both(node: LiveNode, **fields: Any) -> tuple[Reply, Reply]:
    """The same request as a body and as a stream, after checking that they agree."""
    body = node.complete(**{"prompt": "x", **fields})
    stream = node.complete(**{"prompt": "x", **fields}, stream=True)
    assert stream.text() == body.text()
    assert stream.finish() == body.finish()
    assert stream.events[-1] == "[DONE]"
    return body, stream


# --- A01: stop strings


@pytest.mark.parametrize(
    ("said", "stop", "max_tokens", "text", "finish"),
    [
        ("say <<END>>x", END, 30, "say ", "stop"),
        ("say <<no", END, 8, "say <<no", "length"),
        ("say <<END>>x", END, 8, "say <<EN", "length"),
        ("abcSTOP", "cS", 30, "ab", "stop"),
        ("a<<<END>>", END, 30, "a<", "stop"),
        ("a<<END<<END>>b", END, 30, "a<<END", "stop"),
    ],
)
def test_no_piece_of_a_stop_string_is_ever_shown(
    node: LiveNode, said: str, stop: str, max_tokens: int, text: str, finish: str
) -> None:
    """A01; one byte is one token, so a stop string always spans tokens"""
    node.stage.play = says(said, end=False)
    body, stream = both(node, stop=[stop], max_tokens=max_tokens)
    assert (body.text(), body.finish()) == (text, finish)
    generated = said.index(stop) + len(stop) if finish == "stop" else max_tokens
    assert body.usage["completion_tokens"] == generated
    if finish == "stop" and text == "say ":
        assert not any("<" in delta for delta in stream.deltas())


def test_a_stop_string_that_begins_inside_a_token_cuts_that_token(node: LiveNode) -> None:
    """A01 (4): the token `ing` holds the beginning of the stop string"""
    [ing] = node.post("/tokenize", {"model": node.model, "prompt": "ing"}).json["tokens"]
    node.stage.play = emits(*byte_ids("s"), ing, *byte_ids("s!"))
    body, _ = both(node, stop="ngs", max_tokens=9)
    assert (body.text(), body.usage["completion_tokens"]) == ("si", 3)


# --- A02: characters over several tokens


@pytest.mark.parametrize("text", ["😀", "한국어 ok", "好é😀a", "👩‍👩‍👧"])
def test_characters_that_span_tokens_arrive_whole(node: LiveNode, text: str) -> None:
    """A02"""
    node.stage.play = says(text)
    body, stream = both(node, max_tokens=60)
    assert body.text() == text
    assert not any("�" in delta for delta in stream.deltas())


def test_a_limit_inside_a_character_still_ends_properly(node: LiveNode) -> None:
    """A02: the cut tail is dropped, in both forms"""
    node.stage.play = says("ab😀")
    body, _ = both(node, max_tokens=4)
    assert (body.text(), body.finish()) == ("ab", "length")


def test_a_byte_that_is_no_character_holds_nothing_back(node: LiveNode) -> None:
    """A02"""
    node.stage.play = emits(FIRST_BYTE_ID + 0xFF, *byte_ids("ok then"), 2)
    body, _ = both(node, max_tokens=20)
    assert body.text() == "�ok then"
    with node.stage.held() as gate:
        gate.allow(2)  # the prompt with the strange byte, and the letter after it
        with node.stream(COMPLETIONS, {"prompt": "x", "max_tokens": 20}) as stream:
            shown = stream.next_text()
            while len(shown) < 2:  # one delta or two: a busy reader is given both at once
                shown += stream.next_text()
            gate.open()
            rest = joined_text(stream.rest())
    assert (shown, rest) == ("�o", "k then")


# --- A03: usage


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_once_and_is_the_bodys(node: LiveNode, path: str) -> None:
    """A03; conformance 2.1: 8"""
    body: dict[str, Any] = {"max_tokens": 5, "use_prefix_cache": False}
    body |= node.chat_body() if path == CHAT else {"model": node.model, "prompt": "hi"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream, whole = node.post(path, {**body, **options}), node.post(path, body)
    given = [chunk for chunk in stream.chunks if chunk["usage"] is not None]
    assert given == [stream.chunks[-1]]
    assert given[0]["choices"] == []
    assert stream.chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert stream.events[-1] == "[DONE]"
    assert stream.usage == whole.usage
    assert whole.usage["total_tokens"] == whole.usage["prompt_tokens"] + 5
    unasked = node.post(path, {**body, "stream": True})
    assert not any(chunk.get("usage") for chunk in unasked.chunks)


def test_running_usage_grows_to_the_final_one(node: LiveNode) -> None:
    """conformance 2.1: 8"""
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = node.complete("x", max_tokens=5, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


# --- A07: how it ended


@pytest.mark.parametrize(
    ("said", "finish", "tokens"), [(says("aaaa"), "length", 3), (says("a"), "stop", 2),
                                   (says("ab"), "stop", 3)],
)  # fmt: skip
def test_the_finish_reason_is_true_and_comes_once(
    node: LiveNode, said: Play, finish: str, tokens: int
) -> None:
    """A07; Reply.finish checks that exactly the last part of the choice has it"""
    node.stage.play = said
    body, _ = both(node, max_tokens=3)
    assert (body.finish(), body.usage["completion_tokens"]) == (finish, tokens)
    chat = node.chat(max_tokens=3, stream=True)
    assert chat.finish() == finish


def test_the_first_chunk_of_a_chat_has_the_role_and_no_text(node: LiveNode) -> None:
    """conformance 2.2: 5, part 3"""
    chunks = node.chat(max_tokens=3, n=2, stream=True).chunks
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert parts[-1]["delta"] == {}


# --- A14: failures


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bad_stream_request_is_an_ordinary_error(node: LiveNode, path: str) -> None:
    """A14 (1), (2)"""
    body = node.chat_body("long " * 2000) if path == CHAT else {"prompt": [70] * 2000}
    for fields in ({}, {"temperature": 9}):
        reply = node.post(path, {"model": node.model, **body, **fields, "stream": True})
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_http_error(node: LiveNode, stream: bool) -> None:
    """A14 (3)"""
    node.stage.poison = frozenset(byte_ids("~"))
    reply = node.complete("~", stream=stream)
    assert reply.status == 502
    assert reply.error["code"] == "backend_error"
    assert reply.headers["x-should-retry"] == "true"


def test_a_failure_in_the_middle_is_an_error_event_and_the_end(node: LiveNode) -> None:
    """A14 (4)"""
    node.stage.poison = frozenset(byte_ids("~"))
    node.stage.play = says("abc~def")
    reply = node.complete("x", max_tokens=20, stream=True)
    assert reply.status == 200
    assert reply.text().startswith("abc")
    assert "error" in reply.chunks[-1]
    assert reply.chunks[-1]["error"]["code"] == "backend_error"
    assert "[DONE]" not in reply.events
    assert all(part["finish_reason"] is None for c in reply.chunks[:-1] for part in c["choices"])
    assert node.complete("x", max_tokens=20).status == 502


def test_a_failure_hurts_no_neighbour(node: LiveNode) -> None:
    """A14, D04: the step that failed is repeated for the others"""
    prompt = {"prompt": "neighbour", "max_tokens": 12, "seed": 1}
    alone = node.complete(**prompt).text()
    node.stage.poison = frozenset(byte_ids("~"))
    node.stage.play = by_prompt({"breaks": says("ab~")})
    with ThreadPoolExecutor() as pool, node.stage.held() as gate:
        gate.allow(1)
        with node.stream(COMPLETIONS, prompt) as neighbour:
            broken = pool.submit(node.complete, "breaks", max_tokens=9)
            until(lambda: node.num_open == 2, "both to be accepted")
            gate.open()
            assert broken.result().status == 502
            assert joined_text(neighbour.rest()) == alone
    assert node.complete(**prompt).text() == alone


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_prompt_fails_the_others_stop(node: LiveNode, stream: bool) -> None:
    """A14, C02: one answer or one error, and no work that nobody will see"""
    generated = node.metric("kvota_generated_tokens_total")
    node.stage.poison = frozenset(byte_ids("~"))
    prompts = ["~", "x", "y"]
    with ThreadPoolExecutor() as pool, node.stage.held() as gate:
        failing = pool.submit(node.complete, prompts, max_tokens=800, stream=stream)
        until(lambda: node.num_open == 3, "all to be accepted")
        gate.allow(8)  # the step that fails, and its parts one by one
        until(lambda: node.num_open < 3, "the first to fail")
        for _ in range(5):  # turns of the loop: the failure is read, letters are posted
            node.on_loop(lambda: None)
        gate.open()
        reply = failing.result()
    assert reply.status == 502 if not stream else "backend_error" in reply.content.decode()
    node.wait_idle()
    assert node.metric("kvota_generated_tokens_total") <= generated + 2 * 10


# --- A15: tool calls

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("now", "find")
]
CALLS = (
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "find", "arguments": {"q": {"a": "}{", "b": "say \\"hi\\""}}}\n'
    "</tool_call>"
)


def test_streamed_tool_calls_are_those_of_the_body(node: LiveNode) -> None:
    """A15"""
    node.stage.play = says(CALLS)
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 400}
    body, stream = node.chat(**fields), node.chat(**fields, stream=True)
    message = body.json["choices"][0]["message"]
    calls = message["tool_calls"]
    assert message["content"] is None
    assert body.finish() == stream.finish() == "tool_calls"
    assert [call["function"]["name"] for call in calls] == ["now", "find"]
    assert len({call["id"] for call in calls}) == 2
    pieces = [
        piece for part in stream.of_choice(0) for piece in part["delta"].get("tool_calls") or ()
    ]
    for index, call in enumerate(calls):
        first, *later = [piece for piece in pieces if piece["index"] == index]
        assert first["id"]
        assert first["type"] == "function"
        assert first["function"]["name"] == call["function"]["name"]
        assert all(set(piece) == {"index", "function"} for piece in later)
        assert all(set(piece["function"]) == {"arguments"} for piece in later)
        arguments = "".join(piece["function"]["arguments"] for piece in [first, *later])
        assert arguments == call["function"]["arguments"]
    assert stream.text() == ""


def test_text_that_only_looks_like_a_call_is_text(node: LiveNode) -> None:
    """A15; conformance 2.1: 14"""
    node.stage.play = says("a <tool_ b")
    assert node.chat(tools=TOOLS, max_tokens=40, stream=True).text() == "a <tool_ b"
    node.stage.play = says(CALLS)
    for choice in (None, "none"):
        tools: dict[str, Any] = {} if choice is None else {"tools": TOOLS}
        reply = node.chat(**tools, tool_choice=choice, max_tokens=400)
        assert reply.text() == CALLS


def test_a_required_call_is_one_whatever_the_model_wants(node: LiveNode) -> None:
    """A15; the grammar leaves no other way"""
    node.stage.play = says("no, I will not", '<tool_call>\n{"name": "now", "arguments": {}}')
    chosen = {"type": "function", "function": {"name": "now"}}
    tool = {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}
    tools = [{"type": "function", "function": tool}]
    reply = node.chat(tools=tools, tool_choice=chosen, max_tokens=200, temperature=0)
    [call] = reply.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


# --- E04: silence before the first token


def test_silence_is_bridged_by_comments_outside_of_events() -> None:
    """E04: while it waits in line, and while the prompt is read"""
    with live_node(heartbeat_s=0.05, max_running_requests=1) as node:
        plain = node.chat("q", max_tokens=6, seed=1, stream=True)
        with (
            node.stage.held() as gate,
            node.stream(CHAT, node.chat_body("first", max_tokens=3)) as first,
            node.stream(CHAT, node.chat_body("q", max_tokens=6, seed=1)) as waiting,
        ):
            assert waiting.status == 200  # a comment has come, so the 200 has
            lines = [waiting.next_line() for _ in range(8)]
            assert sum(line.startswith(":") for line in lines) >= 3
            assert all(line == "" or line.startswith(":") for line in lines)
            gate.open()
            first.rest()
            rest = waiting.rest()
        assert rest[-1] == "[DONE]"
        assert joined_text(rest) == plain.text()
        node.wait_idle()


def test_refusals_come_before_any_heartbeat() -> None:
    """E04"""
    with live_node(heartbeat_s=0.05, max_running_requests=1, max_waiting_queue=0) as node:
        with node.stage.held(), node.stream(CHAT, node.chat_body("first")):
            full = node.chat("second", stream=True)
            assert (full.status, full.error["code"]) == (503, "queue_full")
            assert node.chat("second", stream=True, temperature=7).status == 400
        node.wait_idle()


def test_a_failure_after_a_heartbeat_is_an_error_event() -> None:
    """E04, A14"""
    with live_node(heartbeat_s=0.05) as node:
        node.stage.poison = frozenset(byte_ids("~"))
        with node.stage.held() as gate, node.stream(COMPLETIONS, {"prompt": "~"}) as stream:
            assert stream.status == 200
            gate.open()
            events = stream.rest()
        assert len(events) == 1
        assert '"backend_error"' in events[0]
        node.wait_idle()

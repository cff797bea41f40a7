"""Log probabilities, forms, seeds and reused KV, seen from outside."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.support.http_client import CHAT, COMPLETIONS, Reply
from tests.support.live_node import LiveNode, live_node, until
from tests.support.stage import Stage, says
from tests.support.tiny_tokenizer import VOCAB_SIZE

SEEDED: dict[str, Any] = {"seed": 42, "temperature": 0.8, "max_tokens": 16}


def logprobs_of(reply: Reply, choice: int = 0) -> Any:
    assert reply.status == 200, reply.content
    return reply.json["choices"][choice]["logprobs"]


# --- A04, A05: log probabilities


@pytest.mark.parametrize(("top", "num_top"), [({}, 0), ({"top_logprobs": 3}, 3)])
def test_chat_logprobs_have_an_item_for_each_token(
    node: LiveNode, top: dict[str, int], num_top: int
) -> None:
    """A04; conformance 2.3: 3, streamed too"""
    node.stage.play = says("hé 😀")
    body = node.chat(logprobs=True, **top)
    content = logprobs_of(body)["content"]
    assert len(content) == body.usage["completion_tokens"]
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in content)
    assert all(len(entry["top_logprobs"]) == num_top for entry in content)
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == body.text()
    parts = node.chat(logprobs=True, **top, stream=True).of_choice(0)
    streamed = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
    assert streamed == content


def test_top_logprobs_without_logprobs_are_refused(node: LiveNode) -> None:
    """A04; conformance 2.1: 5"""
    assert node.chat(top_logprobs=3).error["param"] == "top_logprobs"
    assert node.chat(logprobs=True, top_logprobs=21).status == 400


@pytest.mark.parametrize(("asked", "entries"), [(0, {1}), (1, {1, 2}), (5, {5, 6})])
def test_completion_logprobs_have_four_lists_of_one_length(
    node: LiveNode, asked: int, entries: set[int]
) -> None:
    """A04; conformance 2.1: 3, 12"""
    found = logprobs_of(node.complete("hi", logprobs=asked, max_tokens=4))
    assert {len(found[name]) for name in found} == {4}
    assert found["text_offset"] == sorted(found["text_offset"])
    assert {len(top) for top in found["top_logprobs"]} <= entries


def test_an_echo_alone_is_the_prompt_with_its_logprobs(node: LiveNode) -> None:
    """A05"""
    text = "two plus two is four"
    reply = node.complete(text, echo=True, max_tokens=0, logprobs=1)
    found = logprobs_of(reply)
    assert (reply.text(), reply.usage["completion_tokens"]) == (text, 0)
    assert found["token_logprobs"][0] is None
    assert all(-1000 < value <= 0 for value in found["token_logprobs"][1:])
    assert node.complete("next", max_tokens=1).status == 200


def test_echoed_tokens_join_to_the_text_at_their_offsets(node: LiveNode) -> None:
    """A05"""
    reply = node.complete("\nhello the world", echo=True, max_tokens=3, logprobs=1)
    found, text = logprobs_of(reply), reply.text()
    assert "".join(found["tokens"]) == text
    before = 0
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert offset == before
        before += len(token)


def test_a_biased_token_is_the_one_that_comes(node: LiveNode) -> None:
    """conformance 2.3: 3"""
    assert node.complete("x", logit_bias={"80": 100}, max_tokens=4).text() == "M" * 4
    forbidden = node.complete("x", logit_bias={"80": -100}, max_tokens=60, temperature=1)
    assert "M" not in forbidden.text()


# --- A16: forms


BAD_FORMATS: list[Any] = [
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": ""}},
    {"type": "json_schema", "json_schema": {"name": "s"}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {
        "type": "object", "properties": {"a": {"type": "nope"}}}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/$defs/none"}}},
    {"type": "yaml"},
    {"type": 1},
    {},
    "json",
]  # fmt: skip


def deep_schema(depth: int) -> bytes:
    return b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth


@pytest.mark.parametrize("given", BAD_FORMATS)
def test_a_bad_format_is_refused_by_name_and_the_stream_beside_it_goes_on(
    node: LiveNode, given: Any
) -> None:
    """A16"""
    body = {"prompt": "beside", "max_tokens": 9, "seed": 1}
    alone = node.complete(**body).text()
    with ThreadPoolExecutor() as pool, node.stage.held() as gate:
        beside = pool.submit(node.complete, **body, stream=True)
        until(lambda: node.num_open == 1, "the stream to run")
        error = node.chat(response_format=given).error
        assert error["param"].startswith("response_format")
        gate.open()
        assert beside.result().text() == alone


def test_a_schema_of_two_thousand_levels_is_refused(node: LiveNode) -> None:
    """A16"""
    format_ = b'{"type":"json_schema","json_schema":{"name":"s","schema":%b}}' % deep_schema(2000)
    plain = msgspec.json.encode(node.chat_body())
    body = plain[:-1] + b',"response_format":' + format_ + b"}"
    assert "response_format" in node.post(CHAT, body).error["param"]


def test_an_answer_keeps_to_its_schema_or_is_cut(node: LiveNode) -> None:
    """A16: a babbling model writes valid JSON"""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    finishes = set()
    for seed in range(12):
        reply = node.chat(response_format=format_, seed=seed, max_tokens=60)
        finishes.add(reply.finish())
        if reply.finish() == "stop":
            jsonschema.validate(msgspec.json.decode(reply.text()), schema)
    assert "stop" in finishes
    assert node.chat(response_format=format_, max_tokens=2).finish() == "length"


def test_a_grammar_that_becomes_too_complex_is_the_clients_fault(node: LiveNode) -> None:
    """It compiles, and no retry would help: not a 502, which clients repeat and gateways count"""
    endless = 'start: ("a"|"aa"|"aaa") start'
    reply = node.complete(structured_outputs={"grammar": endless}, max_tokens=200)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_request"
    assert reply.error["param"] == "structured_outputs.grammar"
    assert reply.headers["x-should-retry"] == "false"
    assert node.complete(max_tokens=2).status == 200


def test_text_format_is_as_if_absent(node: LiveNode) -> None:
    """A16"""
    fields = {"max_tokens": 8, "seed": 3}
    plain = node.chat(**fields).text()
    assert node.chat(response_format={"type": "text"}, **fields).text() == plain


# --- A17: seeds


def test_a_seed_repeats_whatever_runs_beside_it(node: LiveNode) -> None:
    """A17; on real kernels in test_process.py"""
    alone = node.complete("seeded", **SEEDED).text()
    triple = node.complete("seeded", **SEEDED, n=3)
    texts = [triple.text(choice) for choice in range(3)]
    assert len(set(texts)) > 1
    for neighbour in ({}, {"seed": 7}, {"seed": 42}):
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(
                node.complete, "other", temperature=0.9, max_tokens=40, n=2, **neighbour
            )
            assert node.complete("seeded", **SEEDED).text() == alone
            again = node.complete("seeded", **SEEDED, n=3)
            assert [again.text(choice) for choice in range(3)] == texts
            assert beside.result().status == 200
    for i in range(10):
        node.complete(f"request {i}", max_tokens=3)
    assert node.complete("seeded", **SEEDED).text() == alone


def test_requests_without_a_seed_differ(node: LiveNode) -> None:
    """A17, conformance 2.1: 10"""
    texts = {node.complete("x", max_tokens=12, temperature=1).text() for _ in range(5)}
    assert len(texts) > 1


# --- D03: preemption


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "logprobs": 2}, {"stop": "\\n~"}]
)
def test_a_preempted_request_loses_and_repeats_nothing(fields: dict[str, Any]) -> None:
    """D03: seven blocks, and two requests that need five each"""
    prompts = [[70 + i] * 18 for i in range(2)]
    how = {"temperature": 0, **fields, "max_tokens": 20}
    with live_node(Stage(num_blocks=7, block_size=8), admission="optimistic") as node:
        alone = [node.complete(given, **how) for given in prompts]
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            sent = [pool.submit(node.complete, given, **how) for given in prompts]
            until(lambda: node.num_open == 2, "both to be there")
            gate.open()
            together = [future.result() for future in sent]
        assert node.metric("kvota_preemptions_total") >= 1
        for one, other in zip(alone, together, strict=True):
            assert other.text() == one.text()
            assert other.usage["completion_tokens"] == 20
            assert other.usage["prompt_tokens"] == 18
            assert other.json["choices"][0]["logprobs"] == one.json["choices"][0]["logprobs"]
        streams = [node.complete(given, **how, stream=True).text() for given in prompts]
        assert streams == [reply.text() for reply in alone]
        node.wait_idle()


def test_fifty_long_answers_in_a_pool_for_two_all_end() -> None:
    """D05"""
    with live_node(Stage(num_blocks=8, block_size=8), max_running_requests=16) as node:
        how = {"max_tokens": 24, "temperature": 0}
        alone = node.complete([70] * 8, **how).text()
        with ThreadPoolExecutor(50) as pool:
            sent = [pool.submit(node.complete, [70] * 8, **how) for _ in range(50)]
            assert {future.result().text() for future in sent} == {alone}
        whole = node.complete([70] * 40, max_tokens=24)
        assert whole.usage["total_tokens"] == 64
        node.wait_idle()


# --- D02, D06, D07: reused KV


@pytest.fixture(scope="module")
def caching_node() -> Iterator[LiveNode]:
    with live_node(Stage(num_blocks=128, block_size=16)) as node:
        yield node
        node.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_counted_in_whole_blocks(caching_node: LiveNode, stream: bool) -> None:
    """D06"""
    node = caching_node
    fields: dict[str, Any] = {"max_tokens": 2, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    prompt = [90 + stream] * 40

    def cached(**more: Any) -> int:
        details = node.complete(prompt, **fields, **more).usage["prompt_tokens_details"]
        count: int = details["cached_tokens"]
        return count

    assert [cached(use_prefix_cache=False), cached(), cached()] == [0, 0, 32]
    assert cached(use_prefix_cache=False) == 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 32


def test_an_operator_can_do_without_the_cache() -> None:
    """D06"""
    with live_node(prefix_cache=False) as node:
        for _ in range(2):
            usage = node.complete([70] * 40, max_tokens=1).usage
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        node.wait_idle()
        assert node.metrics()["kvota_kv_blocks{state=cached}"] == 0


def test_answers_do_not_depend_on_what_is_cached(caching_node: LiveNode) -> None:
    """D02"""
    node = caching_node
    how = {"max_tokens": 24, "temperature": 0}
    questions = [[100] * 80 + [101 + i] * 8 for i in range(8)]
    fresh = [node.complete(q, **how, use_prefix_cache=False).text() for q in questions]
    for _ in range(3):
        assert [node.complete(q, **how).text() for q in questions] == fresh
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda q: node.complete(q, **how).text(), questions)) == fresh


def test_prompt_logprobs_survive_a_cached_prompt(caching_node: LiveNode) -> None:
    """D07"""
    fields = {"echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    first, second = (
        logprobs_of(caching_node.complete([120, 121, 122] * 16, **fields)) for _ in range(2)
    )
    assert first == second
    assert len(first["token_logprobs"]) == 49
    assert None not in first["token_logprobs"][1:]


@pytest.mark.parametrize("token", [0, VOCAB_SIZE - 1])
def test_the_first_and_the_last_token_may_be_asked_for(node: LiveNode, token: int) -> None:
    """A11, from the other side"""
    assert node.complete([token], stop_token_ids=[token], max_tokens=1).status == 200
    assert node.post(COMPLETIONS, {"model": node.model, "prompt": [token]}).status == 200

"""What a client may send, and what it is told when it may not.

Numbers like A01 name public bug reports of other servers that each test answers to.
"""

import re
import threading
from typing import Any

import pytest

from tests.support.http_client import CHAT, COMPLETIONS, Reply, joined_text
from tests.support.live_node import LiveNode, live_node, staged_model
from tests.support.stage import says
from tests.support.tiny_tokenizer import VOCAB_SIZE

SAY_ONE = says("one", end=False)


def refusal(reply: Reply, param: str | None = None) -> dict[str, Any]:
    """The error of a request that is the client's mistake; a retry would be the same mistake."""
    assert reply.status == 400, reply.content
    assert reply.headers["x-should-retry"] == "false"
    error = reply.error
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert (error["param"] or "").startswith(param), error
    return error


# --- A06: limits of the answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_null_limit_is_no_limit(node: LiveNode, path: str) -> None:
    """A06"""
    node.stage.play = says("x" * 30)
    body = node.chat_body() if path == CHAT else {"model": node.model, "prompt": "hi"}
    left_out, null = node.post(path, body), node.post(path, {**body, "max_tokens": None})
    assert left_out.status == null.status == 200
    assert left_out.text() == null.text()
    assert left_out.usage["completion_tokens"] == (31 if path == CHAT else 16)


def test_max_completion_tokens_wins(node: LiveNode) -> None:
    """A06"""
    assert node.chat(max_completion_tokens=4).usage["completion_tokens"] == 4
    both = node.chat(max_completion_tokens=4, max_tokens=9)
    assert both.usage["completion_tokens"] == 4


@pytest.mark.parametrize("limit", [0, -1, 1.5, "4", 1e12, 10**12, True, [], {}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_limit_that_is_none_is_refused_by_name(node: LiveNode, path: str, limit: Any) -> None:
    """A06"""
    body = node.chat_body() if path == CHAT else {"model": node.model, "prompt": "hi"}
    refusal(node.post(path, {**body, "max_tokens": limit}), "max_tokens")
    assert node.post(path, {**body, "max_tokens": 1}).status == 200


# --- A08: the context


@pytest.fixture(scope="module")
def small_node() -> Any:
    with live_node(served=staged_model(max_model_len=64)) as node:
        yield node


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "counts"), [(8, 61, {64, 69, 8, 61}), (200, None, {64, 200}),
                                             (64, None, {64})],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_over_the_context_is_refused_with_true_counts(
    small_node: LiveNode, num_prompt: int, max_tokens: int | None, counts: set[int], stream: bool
) -> None:
    """A08, and A14: a stream that cannot be is refused as plainly as a body"""
    prompt = [70] * num_prompt
    error = refusal(small_node.complete(prompt, max_tokens=max_tokens, stream=stream))
    assert error["code"] == "context_length_exceeded"
    told = {int(number) for number in re.findall(r"-?\d+", error["message"])}
    assert told == counts, error["message"]


def test_a_prompt_that_leaves_one_place_gets_one_token(small_node: LiveNode) -> None:
    """A08"""
    reply = small_node.complete([70] * 63)
    assert (reply.status, reply.finish()) == (200, "length")
    assert reply.usage["prompt_tokens"] == 63
    assert reply.usage["completion_tokens"] == 1


# --- A09: content in parts


@pytest.mark.parametrize("role", ["system", "user", "assistant", "developer"])
def test_parts_say_the_same_as_one_string(node: LiveNode, role: str) -> None:
    """A09"""
    parts = [{"type": "text", "text": "red, "}, {"type": "text", "text": "green, blue"}]
    replies = [
        node.post(CHAT, {
            "model": node.model, "max_tokens": 8, "temperature": 0,
            "messages": [{"role": role, "content": content}, {"role": "user", "content": "go"}],
        })
        for content in (parts, "red, green, blue")
    ]  # fmt: skip
    assert replies[0].text() == replies[1].text()
    assert replies[0].usage["prompt_tokens"] == replies[1].usage["prompt_tokens"]


def test_a_part_that_is_no_text_is_refused_by_place(node: LiveNode) -> None:
    """A09"""
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    content = [{"type": "text", "text": "see"}, image]
    body = {"model": node.model, "messages": [{"role": "user", "content": content}]}
    assert "messages[0].content[1]" in refusal(node.post(CHAT, body))["message"]
    body["messages"] = [{"role": "user", "content": []}]
    refusal(node.post(CHAT, body), "messages[0].content")


# --- A10: nothing to say


@pytest.mark.parametrize("body", [{"messages": []}, {}, {"messages": None}])
def test_no_messages_are_refused(node: LiveNode, body: dict[str, Any]) -> None:
    """A10"""
    refusal(node.post(CHAT, {"model": node.model, **body}), "messages")


@pytest.mark.parametrize("prompt", ["", [], ["", ""], [[]], [""], None, [[70], []], ["a", [70]]])
def test_an_empty_prompt_is_refused(node: LiveNode, prompt: Any) -> None:
    """A10"""
    refusal(node.complete(prompt), "prompt")
    assert node.complete("hi", max_tokens=1).status == 200


def test_an_empty_prompt_is_one_token_where_there_is_a_bos() -> None:
    """A10"""
    with live_node(served=staged_model(bos_id=0)) as node:
        reply = node.complete("", max_tokens=2)
        assert (reply.status, reply.usage["prompt_tokens"]) == (200, 1)


# --- A11: tokens that do not exist


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(VOCAB_SIZE): 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"70": 1000}},
        {"stop_token_ids": [VOCAB_SIZE + 1000]},
        {"prompt": [0, VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [9223372036854775808]},
        {"prompt": [1.5]},
        {"prompt": [True]},
    ],
)
def test_unknown_tokens_are_refused_and_hurt_nobody(node: LiveNode, fields: dict[str, Any]) -> None:
    """A11"""
    alone = node.complete("run", max_tokens=12, seed=3).text()
    with node.stage.held() as gate:
        gate.allow(4)
        with node.stream(COMPLETIONS, {"prompt": "run", "max_tokens": 12, "seed": 3}) as running:
            text = running.next_text()
            refusal(node.complete(**{"prompt": "x", **fields}), next(iter(fields)))
            gate.open()
            text += joined_text(running.rest())
    assert text == alone


# --- A12: the form of an error


@pytest.mark.parametrize(
    ("method", "path", "body", "content_type", "status"),
    [
        ("POST", CHAT, b"{", "application/json", 400),
        ("POST", CHAT, b"", "application/json", 400),
        ("POST", CHAT, b"[]", "application/json", 400),
        ("POST", CHAT, b'"text"', "application/json", 400),
        ("POST", CHAT, b"null", "application/json", 400),
        ("POST", CHAT, b'{"messages":[{"role":"user","content":"x"}]}', "application/json", 400),
        ("POST", CHAT, b'{"model":"?","messages":[{"role":"user","content":"x"}]}',
         "application/json", 404),
        ("POST", COMPLETIONS, b'{"model":"?","prompt":"x"}', "application/json", 404),
        ("POST", COMPLETIONS, b'{"model":"tiny","prompt":"x","temperature":NaN}',
         "application/json", 400),
        ("POST", COMPLETIONS, b'{"model":"tiny","prompt":"\xff"}', "application/json", 400),
        ("POST", COMPLETIONS, b'{"model":"tiny","prompt":"\\ud800"}', "application/json", 400),
        ("POST", COMPLETIONS, b"prompt=x", "application/x-www-form-urlencoded", 415),
        ("GET", CHAT, b"", "application/json", 405),
        ("DELETE", "/v1/models", b"", "application/json", 405),
        ("POST", "/v1/nothing", b"{}", "application/json", 404),
        ("GET", "/", b"", "application/json", 404),
        ("GET", "/v1/models/none", b"", "application/json", 404),
    ],
)  # fmt: skip
def test_every_error_has_the_same_form(
    node: LiveNode, method: str, path: str, body: bytes, content_type: str, status: int
) -> None:
    """A12"""
    headers = {"content-type": content_type}
    reply = Reply(node.http.request(method, path, content=body, headers=headers))
    assert reply.status == status, reply.content
    assert reply.error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        "hello", 1, {}, [1], ["hi"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": 1}], [{"role": 1, "content": "x"}],
        [{"role": "alien", "content": "x"}], [{"role": "user", "content": [1]}], [None],
    ],
)  # fmt: skip
def test_malformed_messages_are_the_clients_mistake(node: LiveNode, messages: Any) -> None:
    """A12; conformance 2.3: kinds of malformed chat bodies"""
    refusal(node.post(CHAT, {"model": node.model, "messages": messages}), "messages")


def test_a_body_over_the_limit_is_413() -> None:
    """A12"""
    with live_node(max_body_bytes=1000) as node:
        reply = node.complete("x" * 2000)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert node.complete("x", max_tokens=1).status == 200


# --- A13: pages of other origins


def test_a_page_of_an_allowed_origin_may_call_and_read() -> None:
    """A13, without the lines about keys"""
    with live_node(cors_origins=("https://x.example",)) as node:
        ask = {
            "Origin": "https://x.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        preflight = node.http.options(CHAT, headers=ask)
        assert preflight.status_code in (200, 204)
        assert preflight.headers["access-control-allow-origin"] == "https://x.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        refused = node.http.post(CHAT, content=b"{", headers={"Origin": "https://x.example"})
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == "https://x.example"
        other = node.http.post(CHAT, content=b"{", headers={"Origin": "https://y.example"})
        assert "access-control-allow-origin" not in other.headers
        assert node.http.head("/health").status_code in (200, 405)


# --- A18: several choices


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices_share_one_prompt(node: LiveNode, stream: bool) -> None:
    """A18"""
    one = node.chat(max_tokens=5)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    reply = node.chat(n=3, max_tokens=5, temperature=1, stream=stream, **options)
    assert [reply.finish(choice) for choice in range(3)] == ["length"] * 3
    assert all(len(reply.text(choice)) == 5 for choice in range(3))
    assert reply.usage["prompt_tokens"] == one.usage["prompt_tokens"]
    assert reply.usage["completion_tokens"] == 15


@pytest.mark.parametrize("n", [0, -1, 10000, 9, 1.5, "2"])
def test_a_number_of_choices_that_cannot_be_is_refused(node: LiveNode, n: Any) -> None:
    """A18; the node runs at most 8 at once"""
    refusal(node.chat(n=n), "n")


# --- A20: nulls, empty values, unknown fields


def test_nulls_and_empty_values_mean_absent(node: LiveNode) -> None:
    """A20"""
    node.stage.play = says("same")
    nulls: dict[str, Any] = {
        "stop": None, "logit_bias": {}, "user": "", "n": None, "temperature": None, "tools": None,
        "seed": None, "stream_options": None, "tool_choice": None, "response_format": None,
        "top_p": None, "logprobs": None, "top_logprobs": None, "stream": None, "metadata": None,
        "max_tokens": None, "max_completion_tokens": None, "parallel_tool_calls": None,
        "presence_penalty": None, "frequency_penalty": None, "service_tier": None, "store": None,
    }  # fmt: skip
    reply = node.chat(**nulls)
    assert (reply.status, reply.text(), reply.finish()) == (200, "same", "stop")


@pytest.mark.parametrize("stop", [[], "", ["", ""]])
def test_an_empty_stop_stops_nothing(node: LiveNode, stop: Any) -> None:
    """A20"""
    node.stage.play = says("whole")
    assert node.chat(stop=stop).text() == "whole"


def test_more_stops_than_the_limit_are_refused_and_five_are_fine(node: LiveNode) -> None:
    """A20; the limit is 16"""
    node.stage.play = says("abcdef")
    assert node.chat(stop=["x", "y", "z", "w", "d"]).text() == "abc"
    refusal(node.chat(stop=[str(i) for i in range(17)]), "stop")


def test_unknown_fields_are_ignored(node: LiveNode) -> None:
    """A20"""
    assert node.chat(foo=1, bar={"deep": [None]}, max_tokens=1).status == 200


# --- conformance 2.1


def test_a_prompt_of_token_ids_is_counted_exactly(node: LiveNode) -> None:
    """conformance 2.1: 1, 2"""
    ids = node.post("/tokenize", {"model": node.model, "prompt": "Hello, my name is"}).json
    by_text = node.complete("Hello, my name is", max_tokens=4, temperature=0)
    by_ids = node.complete(ids["tokens"], max_tokens=4, temperature=0)
    assert by_text.usage["prompt_tokens"] == by_ids.usage["prompt_tokens"] == ids["count"]
    assert by_text.text() == by_ids.text()
    back = node.post("/detokenize", {"model": node.model, "tokens": ids["tokens"]})
    assert back.json["prompt"] == "Hello, my name is"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "sound"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "x"}, "seed"),
        ({"n": []}, "n"),
    ],
)
def test_a_refused_field_is_named_and_the_next_request_works(
    node: LiveNode, fields: dict[str, Any], param: str
) -> None:
    """conformance 2.1: 4, 5, 9, 11; 2.3: 2"""
    refusal(node.complete("x", **fields), param)
    assert node.complete("x", max_tokens=1).status == 200


def test_what_a_node_says_of_itself_is_there(node: LiveNode) -> None:
    """conformance 2.1: 16, 2.6: 1"""
    assert node.get("/ready").status == 200
    assert [model["id"] for model in node.get("/v1/models").json["data"]] == ["tiny"]
    assert node.get("/v1/models/tiny").json["object"] == "model"
    assert node.get("/tokenizer_info").json["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [70, 71], [[70, 71], [72]]])
def test_choices_are_prompts_times_n_streamed_or_not(
    node: LiveNode, prompt: Any, echo: bool, logprobs: int | None, n: int
) -> None:
    """conformance 2.2: 1 to 4"""
    is_many = isinstance(prompt[0], list) or (isinstance(prompt, list) and prompt[0] == "ab")
    num_choices = (2 if is_many else 1) * n
    fields = {"n": n, "echo": echo, "logprobs": logprobs, "max_tokens": 3, "seed": 5}
    body = node.complete(prompt, **fields)
    stream = node.complete(prompt, stream=True, **fields)
    assert len(body.json["choices"]) == num_choices
    for choice in range(num_choices):
        assert stream.text(choice) == body.text(choice)
        assert stream.finish(choice) == body.finish(choice) == "length"


def test_health_answers_while_requests_run(node: LiveNode) -> None:
    """conformance 2.2: 7"""
    with node.stage.held():
        waiting = threading.Thread(target=node.chat, kwargs={"max_tokens": 3})
        waiting.start()
        node.stage.gate.wait_for_step()
        assert node.get("/health").status == 200
        assert node.get("/ready").status == 200
    waiting.join()

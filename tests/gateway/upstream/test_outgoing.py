"""What a backend is sent: the client's fields and nothing of the gateway's."""

import json
from typing import Any

import pytest

from kvota.gateway.upstream.kinds import BackendKind
from kvota.gateway.upstream.outgoing import outgoing_body, outgoing_headers, renamed_body


def sent(body: dict[str, Any] | bytes, kind: BackendKind = BackendKind.VLLM, **also: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads(outgoing_body(raw, model="real", kind=kind, also=also))


def test_only_what_is_stated_is_changed() -> None:
    asked = {
        "model": "alias",
        "messages": [{"role": "user", "content": "日 😀"}],
        "temperature": 0.1,
        "seed": 2**62 + 1,
        "some_new_field": {"deep": [1.0, 1e-7, None]},
        "stream": False,
    }
    changed = {
        "model": "real",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert sent(asked) == {**asked, **changed}


def test_a_field_that_is_there_twice_is_sent_once() -> None:
    body = outgoing_body(b'{"model":"a","n":1,"n":2,"model":"b"}', model="real",
                         kind=BackendKind.OPENAI)  # fmt: skip
    assert body.count(b'"n"') == body.count(b'"model"') == 1
    assert json.loads(body)["n"] == 2


@pytest.mark.parametrize("kind", list(BackendKind))
def test_our_own_fields_are_for_our_own_nodes(kind: BackendKind) -> None:
    said = sent({"model": "m", "use_prefix_cache": False}, kind)
    assert ("use_prefix_cache" in said) == (kind is BackendKind.KVOTA)
    assert said["stream_options"]["include_usage"] is True
    running = "continuous_usage_stats" in said["stream_options"]
    assert running == (kind is BackendKind.VLLM)


@pytest.mark.parametrize(("asked", "whole"), [(None, True), (False, True), (True, False)])
def test_a_node_is_told_whether_half_a_tool_call_would_be_read(asked: bool, whole: bool) -> None:
    for kind in BackendKind:
        said = sent({"model": "m", "stream": asked}, kind)
        told = "whole_tool_calls" in said["stream_options"]
        assert told == (whole and kind is BackendKind.KVOTA)


@pytest.mark.parametrize("given", [{"prompt_logprobs": 1}, {"use_beam_search": True}])
def test_what_cannot_be_streamed_is_not(given: dict[str, Any]) -> None:
    said = sent({"model": "m", **given, "stream_options": {"include_usage": True}})
    assert said["stream"] is False
    assert "stream_options" not in said


@pytest.mark.parametrize("given", [{"prompt_logprobs": None}, {"use_beam_search": False}])
def test_an_absent_wish_is_none(given: dict[str, Any]) -> None:
    assert sent({"model": "m", **given})["stream"] is True


def test_further_fields_may_be_set() -> None:
    assert sent({"model": "m"}, max_tokens=77)["max_tokens"] == 77


def test_a_body_that_is_only_passed_on() -> None:
    body = renamed_body(b'{"model":"a","input":["x"]}', model="real")
    assert json.loads(body) == {"model": "real", "input": ["x"]}


CLIENTS_HEADERS = {
    b"authorization": b"Bearer sk-client",
    b"x-api-key": b"sk-client",
    b"cookie": b"a=b",
    b"proxy-authorization": b"Basic x",
    b"host": b"gateway",
    b"connection": b"x-foo",
    b"x-foo": b"1",
    b"accept-encoding": b"gzip",
    b"x-request-id": b"raw\xff",
    b"traceparent": b"00-abc-def-01",
    b"x-kvota-deadline-s": b"5",
    b"x-kvota-priority": b"batch",
    b"x-kvota-tenant": b"forged",
}


def test_a_foreign_backend_gets_what_names_and_traces_a_request() -> None:
    headers = outgoing_headers(CLIENTS_HEADERS, request_id="r-1", kind=BackendKind.VLLM)
    assert headers == {"x-request-id": "r-1", "traceparent": "00-abc-def-01"}


def test_a_node_also_gets_its_deadline_and_band() -> None:
    headers = outgoing_headers(CLIENTS_HEADERS, request_id="r-1", kind=BackendKind.KVOTA)
    assert headers == {
        "x-request-id": "r-1",
        "traceparent": "00-abc-def-01",
        "x-kvota-deadline-s": "5",
        "x-kvota-priority": "batch",
    }

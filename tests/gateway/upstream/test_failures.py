"""What a backend's error means, in all the forms in which backends say it."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import BackendFailed, Outcome, Refusal, Refused, RequestTimeout
from kvota.edge.problems import error_code, error_headers, error_response, outcome_of
from kvota.gateway.upstream.failures import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_UNSAID_S,
    AttemptFailed,
    FailureKind,
    RejectedByBackend,
    failure_of,
    failure_of_event,
    retry_after_s,
)


def failed(status: int, content: Any = None, **headers: str) -> AttemptFailed | RejectedByBackend:
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return failure_of(status, named, body, backend="b")


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        ({"error": {"message": "no", "type": "t", "param": "p", "code": "c"}}, "no", "c"),
        ({"error": {"message": "no", "type": "t", "param": None, "code": 400}}, "no", None),  # vLLM
        ({"object": "error", "message": "no", "type": "t", "code": 400}, "no", None),  # older vLLM
        ({"error": "no", "error_type": "validation"}, "no", None),  # TGI
        ({"detail": "no"}, "no", None),  # FastAPI
        ({"detail": [{"loc": ["body"], "msg": "no"}]}, '[{"loc":["body"],"msg":"no"}]', None),
        (b"no", "no", None),
        (b"\xff\xfe", "��", None),
        (b"", "The backend refused the request with status 400.", None),
        ([], "[]", None),
        (b"[" * 10_000, "[" * 2000, None),
    ],
)
def test_every_form_of_error_is_understood(content: Any, message: str, code: str | None) -> None:
    said = failed(400, content)
    assert isinstance(said, RejectedByBackend)
    assert said.message == message
    assert said.code == (code or "invalid_request")
    assert set(msgspec.to_builtins(error_response(said))["error"]) == {
        "message", "type", "param", "code",
    }  # fmt: skip


def test_a_rejection_reaches_the_client_as_it_was_said() -> None:
    error = {"message": "too long", "type": "BadRequestError", "param": "messages", "code": "ctx"}
    said = failed(422, {"error": error})
    assert isinstance(said, RejectedByBackend)
    assert said.status == 422
    assert msgspec.to_builtins(error_response(said)) == {"error": error}
    assert (b"x-should-retry", b"false") in error_headers(said, Random(0))
    assert outcome_of(said) is Outcome.INVALID
    assert RejectedByBackend.status == 400, "the class is not changed by one of its instances"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, FailureKind.STATUS), (401, FailureKind.CREDENTIALS), (403, FailureKind.CREDENTIALS),
        (402, FailureKind.STATUS), (404, FailureKind.STATUS), (405, FailureKind.STATUS),
        (408, FailureKind.STATUS), (429, FailureKind.FULL),
        (500, FailureKind.STATUS), (502, FailureKind.STATUS), (503, FailureKind.FULL),
        (529, FailureKind.FULL),
    ],
)  # fmt: skip
def test_what_is_between_the_backend_and_us_may_be_tried_elsewhere(
    status: int, kind: FailureKind
) -> None:
    said = failed(status, {"error": {"message": "your key sk-abcdefgh12345678 is bad"}})
    assert isinstance(said, AttemptFailed)
    assert said.kind_of_failure is kind
    assert said.before_first_byte
    assert "abcdefgh" not in said.message
    assert said.status == BackendFailed.status, "the client sees 502, never our 401"


def test_a_nodes_refusal_stays_a_refusal() -> None:
    body = {"error": {"message": "full", "type": "overloaded_error", "code": "queue_full"}}
    said = failed(503, body, retry_after="9")
    assert isinstance(said, AttemptFailed)
    refused = said.for_client()
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s) == (Refusal.QUEUE_FULL, 9.0)


def test_a_full_backend_that_does_not_say_until_when() -> None:
    said = failed(429, {"error": {"message": "slow down"}})
    assert isinstance(said, AttemptFailed)
    refused = said.for_client()
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == RETRY_AFTER_UNSAID_S
    assert error_code(refused) == "queue_full"


def test_a_nodes_time_limit_stays_one() -> None:
    said = failed(504, {"error": {"message": "late", "code": "request_timeout"}})
    assert isinstance(said, AttemptFailed)
    assert isinstance(said.for_client(), RequestTimeout)
    other = failed(504, b"<html>Gateway Time-out</html>")
    assert isinstance(other, AttemptFailed)
    assert other.for_client() is other


@pytest.mark.parametrize(
    ("error", "before", "kind"),
    [
        ({"message": "x", "code": 500}, True, FailureKind.ERROR_EVENT),
        ({"message": "x", "code": 503}, True, FailureKind.FULL),
        ({"message": "x", "code": "draining"}, False, FailureKind.FULL),
        ("boom", True, FailureKind.ERROR_EVENT),
        ({"message": "x", "code": 400}, False, FailureKind.ERROR_EVENT),
        ({"message": "x", "code": "c"}, True, FailureKind.ERROR_EVENT),
    ],
)
def test_an_error_in_a_stream(error: Any, before: bool, kind: FailureKind) -> None:
    said = failure_of_event(error, backend="b", before_first_byte=before)
    assert isinstance(said, AttemptFailed)
    assert said.kind_of_failure is kind
    assert said.before_first_byte is before


def test_a_mistake_of_the_clients_in_a_stream_that_had_no_content_yet() -> None:
    said = failure_of_event({"message": "x", "code": 400}, backend="b", before_first_byte=True)
    assert isinstance(said, RejectedByBackend)
    assert (said.status, said.message) == (400, "x")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None), ("2", 2.0), (" 2.5 ", 2.5), ("0", 0.0), ("-3", 0.0), ("soon", None),
        ("", None), ("nan", None), ("inf", RETRY_AFTER_MAX_S), ("999999", RETRY_AFTER_MAX_S),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0), ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("Thu, 99 Jan 1970", None),
    ],
)  # fmt: skip
def test_both_forms_of_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, unix_s=60.0) == seconds


@given(st.integers(300, 599), st.binary(max_size=200), st.text(max_size=20))
def test_no_answer_raises_while_it_is_understood(status: int, body: bytes, header: str) -> None:
    said = failure_of(status, {"retry-after": header}, body, backend="b")
    assert said.message

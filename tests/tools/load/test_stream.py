"""What counts as a token and when, however the bytes arrive."""

import json
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.stream import BROKEN, StreamRecord

USAGE = {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event([{"index": 0, "delta": fields, "finish_reason": None}])


FINISH = event([{"index": 0, "delta": {}, "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def seen(
    parts: list[tuple[float, bytes]], *, status: int = 200, headers: dict[str, str] | None = None
) -> Seen:
    """Parts of a stream, each with the second at which it arrives."""
    clock = ManualClock()
    record = StreamRecord(clock, due_s=0.0, keeps_text=True)
    record.begin(status, headers or {})
    for at_s, content in parts:
        clock.advance(at_s - clock.now())
        record.feed(content)
    record.finish()
    return record.seen(Asked(prompt="x", max_tokens=3), sent_s=0.0)


def test_neither_role_nor_usage_is_a_token() -> None:
    one = seen(
        [
            (0.0, delta(role="assistant", content="")),
            (0.4, delta(content="a")),
            (0.5, delta(content="b")),
            (0.6, delta(content="c")),
            (0.7, FINISH + event([], usage={**USAGE, "completion_tokens": 3}) + DONE),
        ]
    )
    assert one.first_token_s == pytest.approx(0.4)
    assert one.gaps_s == pytest.approx([0.1, 0.1])
    assert one.per_token_s == pytest.approx(0.1)
    assert one.ended_s == pytest.approx(0.7)
    assert one.is_whole


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    usage = event([], usage={**USAGE, "completion_tokens": 1})
    one = seen([(0.4, delta(content="a") + FINISH), (0.5, usage + DONE)])
    assert one.first_token_s == pytest.approx(0.4)
    assert one.per_token_s is None
    assert one.stall_s is None


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_the_first_token_and_not_the_first_content(name: str) -> None:
    one = seen([(0.2, delta(**{name: "hm"})), (2.0, delta(content="a") + FINISH + DONE)])
    assert one.first_token_s == pytest.approx(0.2)
    assert one.first_content_s == pytest.approx(2.0)


def test_a_run_cut_inside_its_reasoning_is_whole() -> None:
    one = seen([(0.2, delta(reasoning="hm")), (0.3, FINISH + DONE)])
    assert one.is_whole
    assert one.finish_reason == "length"
    assert one.first_content_s is None


WHOLE = (
    delta(content="  a\n") + b": a comment\n\n" + delta(content="\tü ") + FINISH
    + event([], usage=USAGE) + DONE
)  # fmt: skip


@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE],
        [bytes([byte]) for byte in WHOLE],
        [WHOLE.replace(b"data: {", b"data:{")],
        [WHOLE.replace(b"\n", b"\r\n")],
        [piece for part in WHOLE.split(b"data:") for piece in (part, b"data:")][:-1],
        [WHOLE.replace(b', "delta"', b',\ndata: "delta"')],
        [WHOLE[:-2]],
    ],
    ids=["whole", "bytes", "no space", "crlf", "cut after data:", "two lines", "no last line end"],
)
def test_text_and_counts_do_not_depend_on_how_bytes_arrive(pieces: list[bytes]) -> None:
    one = seen([(0.1, piece) for piece in pieces])
    assert one.text == "  a\n\tü "
    assert (one.output_tokens, one.is_estimated) == (20, False)
    assert len(one.token_s) == 2
    assert one.is_whole


def test_of_several_choices_the_first_is_timed_and_all_are_counted() -> None:
    """Two choices of three tokens, a tenth of a second apart; the second one's come between."""
    clock = ManualClock()
    record = StreamRecord(clock, 0.0)
    record.begin(200, {})
    for _ in range(3):
        for index in (0, 1):
            record.feed(event([{"index": index, "text": "x"}]))
            clock.advance(0.05)
    finish: list[dict[str, Any]] = [
        {"index": index, "text": "", "finish_reason": "length"} for index in (0, 1)
    ]
    record.feed(event(finish, usage={"completion_tokens": 6}) + b"data: [DONE]\n\n")
    found = record.seen(Asked(prompt="", max_tokens=3, n=2), sent_s=0.0)
    assert list(found.token_s) == pytest.approx([0.0, 0.1, 0.2])
    assert (found.output_tokens, found.is_off_length) == (6, False)
    assert found.per_token_s == pytest.approx(0.1)


def test_without_usage_the_length_is_an_estimate() -> None:
    one = seen([(0.1, delta(content="a") + delta(content="b") + FINISH + DONE)])
    assert (one.output_tokens, one.is_estimated) == (2, True)


def test_an_error_in_the_stream_has_its_code() -> None:
    error = {"error": {"message": "gone", "type": "server_error", "code": "backend_error"}}
    one = seen([(0.1, delta(content="a")), (0.2, b"data: " + json.dumps(error).encode() + b"\n\n")])
    assert (one.code, one.message) == ("backend_error", "gone")
    assert not one.is_whole
    assert not one.is_refused


def test_a_refusal_in_a_stream_that_was_opened_is_a_refusal() -> None:
    error = {"error": {"message": "late", "code": "queue_timeout"}}
    one = seen([(9.0, b": queued\n\ndata: " + json.dumps(error).encode() + b"\n\n")])
    assert one.is_refused


@pytest.mark.parametrize("tail", [b"", b"data: {not json\n\n"])
def test_a_stream_that_ends_without_a_reason_is_broken(tail: bytes) -> None:
    assert seen([(0.1, delta(content="a") + tail)]).code == BROKEN


def test_headers_tell_queue_and_retry() -> None:
    headers = {"x-kvota-queue-ms": "250", "retry-after": "7"}
    one = seen([(0.1, FINISH + DONE)], headers=headers)
    assert (one.queued_s, one.retry_after_s) == (0.25, 7.0)
    assert seen([(0.1, FINISH + DONE)], headers={"retry-after": "Fri"}).retry_after_s is None


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"error":{"message":"m","code":"queue_full","type":"t"}}', "queue_full", "m"),
        (b'{"error":{"message":"m","type":"t","code":null}}', "t", "m"),
        (b'{"error":"plain"}', "unknown", "plain"),
        (b'{"object":"error","message":"old vLLM"}', "http_503", "old vLLM"),
        (b"<html>", "http_503", "<html>"),
    ],
)
def test_errors_of_every_shape_are_understood(body: bytes, code: str, message: str) -> None:
    record = StreamRecord(ManualClock(), 0.0)
    record.begin(503, {})
    record.take_body(body)
    one = record.seen(Asked(prompt="x", max_tokens=3), sent_s=0.0)
    assert (one.code, one.message, one.is_refused) == (code, message, True)


def test_a_stall_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    gaps = [0.01] * 18 + [0.5, 0.3]
    moments = [0.1]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    one = Seen(scheduled_s=0, sent_s=0, ended_s=3, token_s=moments, output_tokens=21)
    assert one.stall_s == pytest.approx(0.4), "two of twenty gaps"

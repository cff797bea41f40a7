from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.edge.trust import UsageReport
from kvota.gateway.node_passage import PassedOn, StreamEnd

REPORT = UsageReport(12, 3, 45)
EVENTS = b'data: {"a":"\xc3\xa9"}\n\n: queued position=3\n\ndata: {"b":2}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"x","type":"t","param":null,"code":"request_timeout"}}\n\n'


def passed(end: StreamEnd, stream: bytes, cuts: list[int]) -> bytes:
    borders = [0, *sorted(cuts), len(stream)]
    return b"".join(end.feed(stream[begin:until]) for begin, until in pairwise(borders))


@given(st.lists(st.integers(0, 200), max_size=20))
def test_however_it_is_cut_the_stream_passes_and_the_report_stays(cuts: list[int]) -> None:
    end, stream = StreamEnd(), EVENTS + DONE + REPORT.comment()
    within = [cut for cut in cuts if cut < len(stream)]
    assert passed(end, stream, within) == EVENTS + DONE
    assert end.report == REPORT
    assert end.is_whole
    assert end.error is None
    assert end.num_events == 3


@given(st.lists(st.integers(0, 300), max_size=20))
def test_an_error_is_taken_out_and_is_no_content(cuts: list[int]) -> None:
    end, stream = StreamEnd(), EVENTS + ERROR + REPORT.comment()
    within = [cut for cut in cuts if cut < len(stream)]
    assert passed(end, stream, within) == EVENTS
    assert (end.num_events, end.report) == (2, REPORT)
    assert end.error["code"] == "request_timeout"


def test_an_error_counts_though_its_node_says_done_after_it() -> None:
    end = StreamEnd()
    assert end.feed(EVENTS + ERROR + DONE) == EVENTS
    assert end.error["code"] == "request_timeout"


@pytest.mark.parametrize("stream", [b"", EVENTS, EVENTS + DONE[:-1], EVENTS + b"data: {"])
def test_a_stream_that_was_cut_is_not_whole(stream: bytes) -> None:
    end = StreamEnd()
    end.feed(stream)
    assert not end.is_whole
    assert end.report is None


def test_a_text_that_looks_like_a_report_is_passed_on() -> None:
    end, stream = StreamEnd(), b'data: {"text":": usage prompt=1 cached=2 output=3"}\n\n' + DONE
    assert end.feed(stream) == stream
    assert end.report is None


def test_what_a_node_refuses_keeps_its_code() -> None:
    body = b'{"error":{"message":"full","type":"t","param":null,"code":"queue_full"}}'
    refused = PassedOn(503, body, [(b"retry-after", b"3")])
    assert (refused.status, refused.code, refused.message) == (503, "queue_full", "full")

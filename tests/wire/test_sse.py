"""Event streams read the same however their bytes arrive."""

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvota.wire.sse import DONE, EventBuffer, EventReader, comment, place_in_line


class Value(msgspec.Struct):
    text: str


def values(*reads: bytes) -> list[bytes]:
    reader = EventReader()
    return [value for read in reads for value in reader.feed(read)]


@given(st.lists(st.text(max_size=20), max_size=5), st.integers(1, 7))
def test_what_was_written_is_read_back_from_reads_of_any_size(texts: list[str], size: int) -> None:
    buffer = EventBuffer()
    for text in texts:
        buffer.add(Value(text))
    buffer.add_done()
    stream = comment("heartbeat") + buffer.take()
    reads = [stream[at : at + size] for at in range(0, len(stream), size)]
    *read, done = values(*reads)
    assert [msgspec.json.decode(value, type=Value).text for value in read] == texts
    assert done == b"[DONE]"
    assert not buffer


@given(st.lists(st.integers(0, 30), max_size=4))
def test_any_cut_through_any_line_ending_gives_the_same_values(cuts: list[int]) -> None:
    stream = b"data: a\r\n\r\ndata:b\rdata:  c\n\n: x\n\nid: 1\ndata\n\n"
    places = sorted({0, len(stream), *cuts})
    reads = [stream[start:end] for start, end in pairwise(places)]
    assert values(*reads) == [b"a", b"b\n c", b""]


def test_an_unfinished_event_is_not_an_event() -> None:
    assert values(b"data: a\n") == []
    assert values(b"data: a\n", b"\n") == [b"a"]


def test_a_large_event_in_tiny_reads_is_read_in_time() -> None:
    event = b"data: " + b"x" * 300_000 + b"\n\n"
    [value] = values(*(event[at : at + 7] for at in range(0, len(event), 7)))
    assert len(value) == 300_000


def test_a_comment_is_one_line() -> None:
    assert comment("a\nb") == b": a b\n\n"
    assert values(comment("a\nb"), DONE) == [b"[DONE]"]


def test_a_place_in_line_is_told_in_whole_seconds_that_are_not_too_few() -> None:
    assert place_in_line(3, 11.2) == "queued position=3 eta_s=12"
    assert place_in_line(1, 0.0) == "queued position=1 eta_s=0"
    latest = place_in_line(3, 39.5, "max_tokens")
    assert latest == "queued position=3 eta_s=40 eta_basis=max_tokens"
    assert place_in_line(2, None) == "queued position=2"

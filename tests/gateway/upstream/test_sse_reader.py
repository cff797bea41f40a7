"""Events out of bytes: against the plain reader of wire/, however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.sse_reader import EventTooLong, SseReader
from kvota.wire.sse import EventReader

LIMIT = 10_000


def read(*pieces: bytes) -> list[bytes]:
    reader = SseReader(LIMIT)
    return [value for piece in pieces for value in reader.feed(piece)]


line = st.sampled_from(
    [b"data: a", b"data:b", b"data", b"data:", b"", b"", b": note", b":", b"event: x", b"id",
     b"datax: 1", "data: é日😀".encode(), b'data: {"x":"\\n"}', b"data:  two"]
)  # fmt: skip
newline = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(line, newline), max_size=12), st.data())
def test_any_stream_in_any_pieces_reads_as_the_plain_reader_reads_it(
    lines: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(text + end for text, end in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    plain = EventReader()
    said = [value for piece in pieces for value in plain.feed(piece)]
    expected = [value.replace(b"\n", b" ") for value in said]
    assert read(*pieces) == expected


@pytest.mark.parametrize("size", range(1, 12))
def test_fast_and_slow_path_agree(size: int) -> None:
    stream = b": hi\n\ndata: one\n\ndata: two\ndata: lines\n\n: x\n\ndata: [DONE]\n\n"
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert read(stream) == read(*pieces) == [b"one", b"two lines", b"[DONE]"]


def test_the_latest_comment_is_remembered() -> None:
    reader = SseReader(LIMIT)
    reader.feed(b": queued position=3\n\n")
    assert reader.comment == b"queued position=3"
    reader.feed(b"data: x\n\n:heartbeat\n\n")
    assert reader.comment == b"heartbeat"


def test_the_end_completes_what_was_begun() -> None:
    reader = SseReader(LIMIT)
    assert reader.feed(b"data: x\n\ndata: [DO") == [b"x"]
    assert reader.feed(b"NE]") == []
    assert reader.finish() == [b"[DONE]"]
    assert reader.finish() == []


@pytest.mark.parametrize(
    "pieces",
    [[b"data: " + b"x" * LIMIT], [b"x" * 100] * 200, [b"data: x\n"] * (2 * LIMIT),
     [b"data: " + b"x" * LIMIT + b"x\ndata: more\n"]],
)  # fmt: skip
def test_an_endless_event_is_refused(pieces: list[bytes]) -> None:
    with pytest.raises(EventTooLong):
        read(*pieces)


def test_many_events_are_not_one_long_event() -> None:
    assert len(read(*[b"data: " + b"x" * 900 + b"\r\n\r\n"] * 100)) == 100

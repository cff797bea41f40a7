"""Server-sent events, both directions.

data: {"id":…}⏎⏎        one event; a value never holds a raw line break, JSON escapes them
: heartbeat⏎⏎           a comment, which every client skips
: queued position=3 eta_s=12⏎⏎    another, for people and proxies that look
: queued position=3 eta_s=40 eta_basis=max_tokens⏎⏎    in 40 s at the latest
data: [DONE]⏎⏎          the end of a stream that went well
"""

import math
from collections.abc import Iterator
from typing import Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
)


def comment(text: str) -> bytes:
    """A line that keeps the connection alive and means nothing."""
    return b": %b\n\n" % text.replace("\n", " ").encode()


def place_in_line(position: int, eta_s: float | None, latest_by: str | None = None) -> str:
    """The text of a comment: where a request stands, and when its first chunk is expected.

    Whole seconds, rounded up; without `eta_s` where nobody knows. `latest_by`: what the time
    rests on where it is the latest and no prediction.
    """
    eta = "" if eta_s is None else f" eta_s={math.ceil(eta_s)}"
    eta += "" if latest_by is None else f" eta_basis={latest_by}"
    return f"queued position={position}{eta}"


class EventBuffer:
    """Collects the events of one write. Reused, so that a stream allocates almost nothing."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, chunk: msgspec.Struct) -> None:
        """Append one event."""
        self._bytes += b"data: "
        self._encoder.encode_into(chunk, self._bytes, len(self._bytes))
        self._bytes += b"\n\n"

    def add_done(self) -> None:
        self._bytes += DONE

    def take(self) -> bytes:
        """Everything added since the last take."""
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


class EventReader:
    """Splits a byte stream into the values of its `data:` fields, however the bytes arrive.

    Follows the HTML standard's event-stream rules: lines end with LF, CR or CRLF, one space after
    the colon is dropped, several data lines are joined by LF, comments and other fields are
    skipped, and an event ends at an empty line.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._lines: list[bytes] = []
        self._skip_lf = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the value of each event that `data` completes."""
        for line in self._complete_lines(data):
            if not line:
                if self._lines:
                    yield b"\n".join(self._lines)
                self._lines = []
            elif line.startswith(b"data"):
                self._take_field(line)

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._lines.append(value.removeprefix(b" "))

    def _complete_lines(self, data: bytes) -> Iterator[bytes]:
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        self._rest += data
        if b"\n" not in data and b"\r" not in data:
            return  # without a search: a huge event may come in tiny reads
        self._skip_lf = data.endswith(b"\r")
        *lines, rest = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest
        for line in lines:
            yield bytes(line)

"""Server-sent events as they come from a backend, however the bytes were cut.

Follows the HTML standard's rules (lines end with LF, CR or CRLF; one space after the colon is
dropped; several data lines are one event; unknown fields are skipped), within a bound. But several
lines become one, with spaces: to JSON that is the same, and they go out as one line. What a
well-behaved backend sends in one read, whole events with one line each, is only split.
"""

from typing import Final

_DATA: Final = b"data: "
_BETWEEN: Final = b"\n\ndata: "


class EventTooLong(ValueError):
    """One event has more bytes than a stream may hold back."""


class SseReader:
    """Turns reads into the values of `data:`; remembers the latest comment."""

    def __init__(self, event_bytes_max: int) -> None:
        self._event_bytes_max = event_bytes_max
        self._rest = bytearray()  # of a line whose end has not come
        self._lines: list[bytes] = []  # of an event whose end has not come
        self._num_bytes = 0  # in _lines
        self._is_after_cr = False
        self.comment = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The values of the events that `data` completes. Raises EventTooLong."""
        is_whole = not (self._rest or self._lines or self._is_after_cr)
        if not (is_whole and data.endswith(b"\n\n") and b"\r" not in data):
            return self._feed_lines(data)
        values = data[len(_DATA) : -2].split(_BETWEEN) if data.startswith(_DATA) else []
        if data.count(b"\n") == 2 * len(values):  # none of which is inside of one
            return values
        values = []
        for event in data[:-2].split(b"\n\n"):
            if event.startswith(_DATA) and b"\n" not in event:
                values.append(event[len(_DATA) :])
            else:
                values += self._feed_lines(event + b"\n\n")
        return values

    def finish(self) -> list[bytes]:
        """The stream has ended: what a last line without its end, or its empty line, still says."""
        return self._feed_lines(b"\n\n")

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._is_after_cr and data:
            data = data.removeprefix(b"\n")
            self._is_after_cr = False
        self._rest += data
        if b"\n" not in data and b"\r" not in data:
            self._check_size()  # without a search: a huge event may come in tiny reads
            return []
        self._is_after_cr = data.endswith(b"\r")
        *lines, rest = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest
        values = [value for line in lines if (value := self._take_line(bytes(line))) is not None]
        self._check_size()
        return values

    def _take_line(self, line: bytes) -> bytes | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._lines.append(value.removeprefix(b" "))
            self._num_bytes += len(value)
        elif not name:
            self.comment = value.removeprefix(b" ")
        return None

    def _complete(self) -> bytes | None:
        if not self._lines:
            return None
        value = self._lines[0] if len(self._lines) == 1 else b" ".join(self._lines)
        self._lines = []
        self._num_bytes = 0
        return value

    def _check_size(self) -> None:
        if len(self._rest) + self._num_bytes > self._event_bytes_max:
            raise EventTooLong(f"one event has more than {self._event_bytes_max:,} bytes")

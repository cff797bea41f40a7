"""A load generator for streaming completions that costs little: it shares cores with the server.

One connection a request, raw HTTP/1.1 over asyncio. An event is timed when its bytes arrive and
never parsed; only the last one, with the usage, is read as JSON.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

EVENT_END = b"\n\n"
USAGE = b'"usage":{'


class BenchFailed(Exception):
    """The server answered with something that is not a whole stream."""


@dataclass(slots=True)
class Answer:
    """One finished stream. Times are seconds of `time.perf_counter`."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        """From the request's last byte to the first event with text."""
        return self.first_s - self.sent_s

    @property
    def per_token_s(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


def completion_body(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """A request for exactly `num_tokens` greedy tokens after `prompt`, as a stream with usage."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def complete_together(port: int, bodies: Sequence[bytes]) -> list[Answer]:
    """Send all requests at once; their answers in order. Raises BenchFailed if any is not whole."""
    return list(await asyncio.gather(*(complete(port, body) for body in bodies)))


async def complete_one_by_one(port: int, bodies: Sequence[bytes]) -> list[Answer]:
    return [await complete(port, body) for body in bodies]


async def complete(port: int, body: bytes, path: str = "/v1/completions") -> Answer:
    """Post `body` to the server on this machine and read its stream to the end."""
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(
        lambda: _Stream(loop.create_future()), "127.0.0.1", port
    )
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    stream.answer.sent_s = time.perf_counter()
    transport.write(head.encode() + body)
    try:
        await stream.ended
    finally:
        transport.close()
    return stream.answer


@dataclass(slots=True)
class _Stream(asyncio.Protocol):
    """Reads one response. Chunk sizes of the transfer coding lie between events and are skipped."""

    ended: "asyncio.Future[None]"
    answer: Answer = field(default_factory=lambda: Answer(0.0))
    _head: bytes = b""
    _chunks: "Dechunker" = field(default_factory=lambda: Dechunker())
    _tail: bytes = b""

    def data_received(self, received: bytes) -> None:
        now = time.perf_counter()
        if not self._head.endswith(b"\r\n\r\n"):
            received = self._take_head(received)
        *events, self._tail = (self._tail + self._chunks.feed(received)).split(EVENT_END)
        for event in events:
            if event.startswith(b"data: {"):
                self._take_event(event, now)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is not None or not self.answer.num_tokens:
            start = (self._head + self._tail)[:500].decode(errors="replace")
            self.ended.set_exception(BenchFailed(f"no whole stream: {error or start}"))
        else:
            self.ended.set_result(None)

    def _take_head(self, received: bytes) -> bytes:
        """Keep the response's head; return what of `received` comes after it."""
        head, found, body = (self._head + received).partition(b"\r\n\r\n")
        self._head = head + found
        if found and b" 200 " not in head.split(b"\r\n", 1)[0]:
            self.ended.set_exception(BenchFailed((head + body)[:500].decode(errors="replace")))
        return body if found else b""

    def _take_event(self, event: bytes, now: float) -> None:
        if USAGE in event:
            usage = json.loads(event[len(b"data: ") :])["usage"]
            details = usage.get("prompt_tokens_details") or {}
            self.answer.num_prompt_tokens = usage["prompt_tokens"]
            self.answer.num_cached_tokens = details.get("cached_tokens") or 0
            self.answer.num_tokens = usage["completion_tokens"]
            return
        if not self.answer.first_s:
            self.answer.first_s = now
        self.answer.last_s = now


class Dechunker:
    """Undoes `transfer-encoding: chunked`, however the bytes arrive."""

    def __init__(self) -> None:
        self._pending = b""  # of a size line
        self._left = 0  # bytes of the current chunk, its line end included

    def feed(self, received: bytes) -> bytes:
        """The body bytes that `received` completes."""
        body = []
        data = self._pending + received
        self._pending = b""
        while data:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                # The last two bytes of a chunk are its line end, whole or in part.
                body.append(part[: len(part) - max(0, 2 - self._left)])
                continue
            line, found, rest = data.partition(b"\r\n")
            if not found:
                self._pending = data
                break
            self._left = int(line, 16) + 2
            data = rest
        return b"".join(body)

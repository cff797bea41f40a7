"""A load generator for streaming completions that costs little: it shares cores with the server.

One connection a request, raw HTTP/1.1 over asyncio. An event is timed when its bytes arrive and
never parsed; only the last one, with the usage, is read as JSON.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

EVENT_END = b"\n\n"
USAGE = b'"usage":{'
ERROR = b'{"error"'


class BenchFailed(Exception):
    """The server answered with something that is not a whole stream."""


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are seconds of `time.perf_counter`; 0 is never."""

    sent_s: float
    first_s: float = 0.0  # the first event with text
    last_s: float = 0.0
    ended_s: float = 0.0  # the connection is closed, by whichever side
    status: int | None = None  # None: no answer began
    code: str | None = None  # of the error, as status or as an event of the stream
    message: str | None = None  # of the same error
    is_whole: bool = False  # every token that was asked for, and the proper end
    num_events: int = 0  # with text
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


def completion_body(
    model: str, prompt: Sequence[int], num_tokens: int, *, is_stream: bool = True
) -> bytes:
    """A request for exactly `num_tokens` greedy tokens after `prompt`, with usage."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


async def complete_together(port: int, bodies: Sequence[bytes]) -> list[Answer]:
    """Send all requests at once; their answers in order. Raises BenchFailed if any is not whole."""
    return list(await asyncio.gather(*(complete(port, body) for body in bodies)))


async def complete_in_turn(port: int, bodies: Sequence[bytes], num_clients: int) -> list[Answer]:
    """So many clients, each sending the next request as soon as its last answer is whole.

    The answers are in no order. Raises BenchFailed if any is not whole.
    """
    left = iter(bodies)

    async def client() -> list[Answer]:
        return [await complete(port, body) for body in left]

    of_clients = await asyncio.gather(*(client() for _ in range(num_clients)))
    return [answer for answers in of_clients for answer in answers]


async def complete_one_by_one(port: int, bodies: Sequence[bytes]) -> list[Answer]:
    return [await complete(port, body) for body in bodies]


async def complete(port: int, body: bytes, path: str = "/v1/completions") -> Answer:
    """Post `body` to the server on this machine and read its stream to the end."""
    asked = await ask(port, body, path)
    await asked.ended
    answer = asked.answer
    if not answer.is_whole:
        raise BenchFailed(f"no whole stream: {asked.error or asked.start()}")
    return answer


async def ask(
    port: int,
    body: bytes,
    path: str = "/v1/completions",
    *,
    headers: Mapping[str, str] | None = None,
    num_bytes: int | None = None,
) -> "Asked":
    """Post `body`, or only its first `num_bytes`, and return at once. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, asked = await loop.create_connection(lambda: Asked(loop.create_future()), "127.0.0.1", port)
    own = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n{own}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    asked.send(head.encode() + body[:num_bytes])
    return asked


@dataclass(slots=True)
class Asked(asyncio.Protocol):
    """One request on its way. `ended` is done, never failed, once the connection is closed.

    Chunk sizes of the transfer coding lie between events and are skipped.
    """

    ended: "asyncio.Future[None]"
    answer: Answer = field(default_factory=lambda: Answer(0.0))
    error: Exception | None = None  # of the connection
    is_left: bool = False  # closed from this side before the answer was over
    _transport: asyncio.Transport | None = None
    _head: bytes = b""
    _chunks: "Dechunker | None" = None
    _tail: bytes = b""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, content: bytes) -> None:
        assert self._transport is not None
        self.answer.sent_s = time.perf_counter()
        self._transport.write(content)

    def leave(self) -> None:
        """Close the connection, whatever is still to come. What was sent does arrive."""
        assert self._transport is not None
        self.is_left = not self.ended.done() and not self._is_over
        self._transport.close()

    async def heard(self, num_events: int | None) -> None:
        """Return once so many events with text have come, or the answer has ended."""
        while not self.ended.done():
            if num_events is not None and self.answer.num_events >= num_events:
                return
            self._news.clear()
            await self._news.wait()

    async def ended_or(self, is_over: asyncio.Event) -> bool:
        """Wait for the end, or until `is_over` is set; then leave, and return False."""
        over = asyncio.create_task(is_over.wait())
        await asyncio.wait((self.ended, over), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if self.ended.done():
            return True
        self.leave()
        await self.ended
        return False

    def start(self) -> str:
        """The first bytes of the answer, for a message."""
        return (self._head + self._tail)[:500].decode(errors="replace")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, received: bytes) -> None:
        now = time.perf_counter()
        if self.answer.status is None:
            received = self._take_head(received)
        content = self._chunks.feed(received) if self._chunks is not None else received
        *events, self._tail = (self._tail + content).split(EVENT_END)
        for event in events:
            if event.startswith(b"data: "):
                self._take_event(event[len(b"data: ") :], now)

    def connection_lost(self, error: Exception | None) -> None:
        self.answer.ended_s = time.perf_counter()
        self.error = error
        if not self.ended.done():
            self.ended.set_result(None)
        self._news.set()
        if self._tail.startswith(b"{"):
            self._take_body(self._tail)

    @property
    def _is_over(self) -> bool:
        return self.answer.is_whole or self.answer.code is not None

    def _take_head(self, received: bytes) -> bytes:
        """Keep the response's head; return what of `received` comes after it."""
        head, found, body = (self._head + received).partition(b"\r\n\r\n")
        self._head = head + found
        if not found:
            return b""
        self.answer.status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head.lower():
            self._chunks = Dechunker()
        return body

    def _take_event(self, event: bytes, now: float) -> None:
        answer = self.answer
        if event == b"[DONE]":
            answer.is_whole = answer.num_tokens > 0
        elif event.startswith(ERROR):
            self._take_error(json.loads(event)["error"])
        elif USAGE in event:
            self._take_usage(json.loads(event)["usage"])
        else:
            answer.num_events += 1
            answer.first_s = answer.first_s or now
            answer.last_s = now
            self._news.set()

    def _take_body(self, body: bytes) -> None:
        """An answer that is no stream, as far as it has arrived."""
        with suppress(json.JSONDecodeError):
            content = json.loads(body)
            if "error" in content:
                self._take_error(content["error"])
            elif "usage" in content:
                self._take_usage(content["usage"])
                self.answer.is_whole = True

    def _take_error(self, error: object) -> None:
        """As OpenAI shapes it; of any other shape, its code is "unknown"."""
        fields = error if isinstance(error, dict) else {}
        self.answer.code = str(fields.get("code", "unknown"))
        self.answer.message = str(fields.get("message", error))

    def _take_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.answer.num_prompt_tokens = usage["prompt_tokens"]
        self.answer.num_cached_tokens = details.get("cached_tokens") or 0
        self.answer.num_tokens = usage["completion_tokens"]


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

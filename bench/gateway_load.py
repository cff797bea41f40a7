"""Load for a proxy, from one process: keep-alive connections, raw HTTP, nothing parsed in vain.

A client keeps one connection and asks again as soon as its answer has ended, which is seen by the
bytes that end a chunked body, or by its stated length. So the load costs far less than any proxy.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final

END_OF_CHUNKS: Final = b"0\r\n\r\n"
PATIENCE_S: Final = 60.0


class LoadFailed(Exception):
    """The proxy answered with something else than what was asked for."""


def chat_request(
    port: int, *, model: str, key: str | None, max_tokens: int, is_stream: bool
) -> bytes:
    """A whole HTTP request. The prompt is about as long as a question with a little context."""
    text = "How do I reset the password of the staging database? Please be brief. " * 4
    body = json.dumps(
        {
            "model": model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": text},
            ],
            "max_tokens": max_tokens,
            "stream": is_stream,
            "temperature": 0.7,
        }
    ).encode()
    auth = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{auth}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time."""

    tail: bytes = b""
    head: bytes = b""
    left: int | None = None  # bytes of a body whose length was stated
    num_bytes: int = 0
    first_s: float = 0.0
    transport: asyncio.Transport | None = None
    ended: "asyncio.Future[None] | None" = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, request: bytes) -> float:
        """Seconds to the answer's end. Raises LoadFailed for any status but 200."""
        assert self.transport is not None
        self.head = self.tail = b""
        self.left, self.num_bytes, self.first_s = None, 0, 0.0
        self.begun.clear()
        self.ended = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        self.transport.write(request)
        await asyncio.wait_for(self.ended, PATIENCE_S)
        return time.perf_counter() - began_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, received: bytes) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter()
        if self.left is None and not self.head.endswith(b"\r\n\r\n"):
            received = self._take_head(received)
            if not received:
                return
        self.num_bytes += len(received)
        self.begun.set()
        if self.left is None:
            self.tail = (self.tail + received)[-len(END_OF_CHUNKS) :]
            if self.tail == END_OF_CHUNKS:
                self._end(None)
        elif self.num_bytes >= self.left:
            self._end(None)

    def _take_head(self, received: bytes) -> bytes:
        """The head is kept; what follows it is returned."""
        head, found, body = (self.head + received).partition(b"\r\n\r\n")
        self.head = head + found
        if not found:
            return b""
        if b" 200 " not in head[:15]:
            self._end(LoadFailed((head + b"\n" + body[:300]).decode(errors="replace")))
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self.left = int(line.partition(b":")[2])
        return body

    def connection_lost(self, error: Exception | None) -> None:
        self._end(LoadFailed(f"the proxy closed the connection: {error!r}"))

    def _end(self, error: LoadFailed | None) -> None:
        if self.ended is not None and not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    return connection


async def ask_together(port: int, request: bytes, num_clients: int, seconds: float) -> int:
    """So many clients, each asking again and again for a while; how many answers came."""
    connections = [await connect(port) for _ in range(num_clients)]
    end_s = time.perf_counter() + seconds

    async def client(connection: Connection) -> int:
        number = 0
        while time.perf_counter() < end_s:
            await connection.ask(request)
            number += 1
        return number

    try:
        return sum(await asyncio.gather(*(client(one) for one in connections)))
    finally:
        close(connections)


async def latencies_s(port: int, request: bytes, number: int) -> list[float]:
    """One after the other, on one connection."""
    connection = await connect(port)
    try:
        return [await connection.ask(request) for _ in range(number)]
    finally:
        close([connection])


async def hold_streams(port: int, request: bytes, number: int) -> list[Connection]:
    """Streams that have begun and go on; close them."""
    connections = []
    for _ in range(number):
        connection = await connect(port)
        assert connection.transport is not None
        connection.transport.write(request)
        connections.append(connection)
    await asyncio.wait_for(asyncio.gather(*(one.begun.wait() for one in connections)), PATIENCE_S)
    return connections


def close(connections: list[Connection]) -> None:
    for one in connections:
        assert one.transport is not None
        one.transport.abort()

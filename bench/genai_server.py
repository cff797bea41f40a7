"""openvino-genai's continuous batching behind HTTP, as thin as can be: a yardstick, no product.

It understands what `client.py` sends and nothing else, streams one event a token, and generates to
its end what nobody reads any more. Any GET is answered with the number of tokens so far.

A step of openvino-genai holds Python's lock, so a thread for it would gain nothing and be handed
the lock too late. Hence all is one thread: between two steps it writes what the last one made, and
reads what has arrived meanwhile.
"""

import asyncio
import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.client import GENERATED
from bench.genai_loop import Generation, Pipeline

MODEL = "openvino-genai"
BACKLOG = 1024  # clients that connect during one step
# From a connection that waits to be accepted to its request being read, in turns of asyncio's loop.
TURNS_TO_READ = 4
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)
CHOICE = (
    b'{"id":"cmpl-0","object":"text_completion","created":0,"model":"%s","choices":[{"index":0,'
    b'"text":%%s,"logprobs":null,"finish_reason":%%s}]}' % MODEL.encode()
)
Utf8 = codecs.getincrementaldecoder("utf-8")


async def serve(
    pipeline: Pipeline, vocabulary: Sequence[bytes], ready: Callable[[int], None]
) -> None:
    """Run until cancelled. `ready` is called with the port as soon as it accepts."""
    server = Server(pipeline, vocabulary)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Exchange(server), "127.0.0.1", 0, backlog=BACKLOG)
    async with listening:
        ready(listening.sockets[0].getsockname()[1])
        await server.generate()


class Server:
    """Steps for all exchanges whose request has been read."""

    def __init__(self, pipeline: Pipeline, vocabulary: Sequence[bytes]) -> None:
        self._pipeline = pipeline
        self._vocabulary = vocabulary  # what each token adds to a text
        self._running: list[tuple[Exchange, Generation]] = []
        self._has_work = asyncio.Event()
        self.num_tokens = 0  # of all exchanges so far

    def begin(self, exchange: "Exchange", request: dict[str, Any]) -> None:
        generation = self._pipeline.add(request["prompt"], request["max_tokens"])
        self._running.append((exchange, generation))
        self._has_work.set()

    async def generate(self) -> None:
        while True:
            await self._has_work.wait()
            for _ in range(TURNS_TO_READ):
                await asyncio.sleep(0)
            self._pipeline.step()
            for exchange, generation in self._running:
                pieces = [self._vocabulary[token] for token in generation.new_tokens()]
                self.num_tokens += len(pieces)
                exchange.write(pieces, is_last=generation.is_over)
            self._running = [(e, g) for e, g in self._running if not g.is_over]
            if not self._running:
                self._has_work.clear()


@dataclass(slots=True, eq=False)
class Exchange(asyncio.Protocol):
    """One connection: a request, and the stream that answers it."""

    _server: Server
    _transport: asyncio.Transport | None = None
    _received: bytes = b""
    _num_prompt_tokens: int = 0
    _num_tokens: int = 0
    _text: codecs.IncrementalDecoder = field(default_factory=lambda: Utf8("ignore"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, received: bytes) -> None:
        self._received += received
        head, found, body = self._received.partition(b"\r\n\r\n")
        if found and head.startswith(b"GET "):
            self._tell_count()
        elif found and len(body) == _content_length(head):
            request = json.loads(body)
            self._num_prompt_tokens = len(request["prompt"])
            self._server.begin(self, request)

    def _tell_count(self) -> None:
        assert self._transport is not None
        count = b"%s%d\n" % (GENERATED, self._server.num_tokens)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._transport.write(head % len(count) + count)
        self._transport.close()

    def write(self, pieces: Sequence[bytes], *, is_last: bool) -> None:
        """An event each, and the end of the stream after the last; all in one write.

        There are none while the prompt waits for room in a step.
        """
        assert self._transport is not None
        if self._transport.is_closing() or not (pieces or is_last):
            return
        parts = [] if self._num_tokens else [HEAD]
        self._num_tokens += len(pieces)
        for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            text = json.dumps(self._text.decode(piece)).encode()
            parts.append(_event(CHOICE % (text, b'"length"' if is_last and not left else b"null")))
        if is_last:
            parts += [_event(self._usage()), _event(b"[DONE]"), b"0\r\n\r\n"]
        self._transport.write(b"".join(parts))
        if is_last:
            self._transport.close()

    def _usage(self) -> bytes:
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
        return json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def _event(content: bytes) -> bytes:
    """In a chunk of its own."""
    return b"%x\r\ndata: %s\n\n\r\n" % (len(content) + 8, content)

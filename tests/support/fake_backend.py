"""A backend that does what a test tells it to: OpenAI's API over a real loopback socket.

    async with FakeBackend() as backend:
        backend.script = broken_after(3)
        ...                                # talk to backend.url
        assert backend.generations[0].is_gone.is_set()

A script is a coroutine function that gets what was asked and the wire to answer on; `Wire` has
calls for everything a good or a bad server can do to a socket. Without a script it generates
`num_tokens` words like a well-behaved vLLM. Every request is kept in `received`.

It is a bare asyncio protocol, so that benchmarks can put it in a process of its own:

    python -m tests.support.fake_backend --port 8000 --tokens 128 --delay-s 0
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, cast

import uvloop

GENERATING = ("/v1/chat/completions", "/v1/completions")
DONE = b"data: [DONE]\n\n"
MODEL = "fake-model"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}


@dataclass(eq=False)
class Received:
    """One request as it came over the wire. Header names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    number: int = 1  # on its connection
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)  # cut off before its answer ended
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """What a script can do to the connection. Sends wait while the client does not read."""

    def __init__(self, transport: asyncio.Transport, can_write: asyncio.Event) -> None:
        self._transport = transport
        self._can_write = can_write
        self.is_gone = asyncio.Event()
        self._is_chunked = False
        self.num_sent = 0  # pieces of the body

    async def raw(self, content: bytes) -> None:
        """Bytes as they are, whatever they mean; into a closed connection they are lost."""
        if self._transport.is_closing():
            await self.is_gone.wait()
            return
        self._transport.write(content)
        await self._can_write.wait()

    async def head(
        self,
        status: int = 200,
        *,
        content_type: str = "text/event-stream",
        length: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Status and headers; the body is chunked unless its length is given."""
        self._is_chunked = length is None
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Whatever')}", size]
        lines.append(f"content-type: {content_type}")
        lines.extend(f"{name}: {value}" for name, value in (headers or {}).items())
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def send(self, content: bytes) -> None:
        """One piece of the body, in one write."""
        self.num_sent += 1
        if self._is_chunked:
            content = b"%x\r\n%b\r\n" % (len(content), content)
        await self.raw(content)

    async def send_split(self, content: bytes, size: int) -> None:
        """The same bytes in pieces of `size`, which the client reads one by one."""
        for start in range(0, len(content), size):
            await self.send(content[start : start + size])
            await asyncio.sleep(0)

    async def end(self) -> None:
        if self._is_chunked:
            await self.raw(b"0\r\n\r\n")

    async def json(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(content).encode()
        await self.head(status, content_type="application/json", length=len(body), headers=headers)
        await self.raw(body)

    async def text(self, content: str) -> None:
        body = content.encode()
        await self.head(content_type="text/plain; charset=utf-8", length=len(body))
        await self.raw(body)

    async def stall(self) -> None:
        """Say nothing until the client gives up."""
        await self.is_gone.wait()

    async def pause(self, seconds: float) -> None:
        """Say nothing for a while, or until the client gives up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_gone.wait(), seconds)

    def drop(self) -> None:
        """Close in the middle, politely (FIN)."""
        self._transport.close()

    def reset(self) -> None:
        """Close in the middle with a reset (RST), unless the client was first."""
        if self._transport.is_closing():
            return
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


Script = Callable[[Received, Wire], Awaitable[None]]


@dataclass
class Gauges:
    """What the backend says of itself."""

    num_blocks: int = 4096
    block_size: int = 16
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    max_model_len: int = 8192
    is_healthy: bool = True


class FakeBackend:
    """Listens on 127.0.0.1 (or on a unix socket) from `__aenter__` to `__aexit__`."""

    def __init__(
        self, *, num_tokens: int = 8, delay_s: float = 0.0, unix_socket: str | None = None
    ) -> None:
        self.num_tokens = num_tokens
        self.delay_s = delay_s  # before each token
        self.num_at_once = 0  # answers of so many tokens come at once all the same
        self.script: Script | None = None  # instead of generating
        self.scripts: deque[Script] = deque()  # one for each of the next generations, then `script`
        self.overrides: dict[str, Script] = {}  # by path
        self.gauges = Gauges()
        self.received: list[Received] = []
        self.keeps_received = True
        self.num_connections = 0  # open now
        self.unix_socket = unix_socket
        self.port = 0
        self._server: asyncio.Server | None = None
        self._is_stopped = False
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        return "http://localhost" if self.unix_socket else f"http://127.0.0.1:{self.port}"

    @property
    def generations(self) -> list[Received]:
        return [one for one in self.received if one.path in GENERATING]

    async def __aenter__(self) -> "FakeBackend":
        await self.listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def listen(self, port: int = 0) -> None:
        self._is_stopped = False
        loop = asyncio.get_running_loop()
        if self.unix_socket:
            self._server = await loop.create_unix_server(self._connection, self.unix_socket)
        else:
            self._server = await loop.create_server(
                self._connection, "127.0.0.1", port, backlog=1024
            )
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, cut every connection, and wait for the scripts to end."""
        assert self._server is not None
        self._is_stopped = True
        await self._stop_accepting(self._server)
        tasks = [task for one in list(self._connections) if (task := one.cut()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_accepting(self, server: asyncio.Server) -> None:
        """asyncio leaks a connection that a closing server catches half accepted: let them in."""
        loop = asyncio.get_running_loop()
        for one in server.sockets:
            loop.remove_reader(one.fileno())
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:  # also when cut short: else the port would be taken for good
            server.close()

    def _connection(self) -> "_Connection":
        return _Connection(self)

    async def answer(self, asked: Received, wire: Wire) -> None:
        await self._script_for(asked)(asked, wire)

    def _script_for(self, asked: Received) -> Script:
        path = asked.path.partition("?")[0]
        if path in self.overrides:
            return self.overrides[path]
        if path in GENERATING:
            if self.scripts:
                return self.scripts.popleft()
            return self.script or self._generate
        return {
            "/health": self._health,
            "/ready": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/tokenize": self._tokenize,
            "/v1/embeddings": self._embed,
        }.get(path, _not_found)

    async def _generate(self, asked: Received, wire: Wire) -> None:
        wanted = asked.json
        budget = wanted.get("max_completion_tokens") or wanted.get("max_tokens")
        num_tokens = min(self.num_tokens, budget or self.num_tokens)
        delay_s = self.delay_s if num_tokens > self.num_at_once else 0.0
        if not wanted.get("stream"):
            await wire.pause(delay_s * num_tokens)
            await wire.json(whole_answer(asked.path, num_tokens, num_choices(wanted)))
            return
        has_usage = bool((wanted.get("stream_options") or {}).get("include_usage"))
        await wire.head()
        for event in ordinary_events(asked.path, num_tokens, num_choices(wanted), has_usage):
            if delay_s:
                await wire.pause(delay_s)
            if wire.is_gone.is_set():
                return
            await wire.send(event)
        await wire.end()

    async def _health(self, asked: Received, wire: Wire) -> None:
        await wire.json({}, 200 if self.gauges.is_healthy else 503)

    async def _models(self, asked: Received, wire: Wire) -> None:
        card = {"id": MODEL, "object": "model", "max_model_len": self.gauges.max_model_len}
        await wire.json({"object": "list", "data": [card]})

    async def _metrics(self, asked: Received, wire: Wire) -> None:
        await wire.text(vllm_metrics(self.gauges))

    async def _tokenize(self, asked: Received, wire: Wire) -> None:
        """vLLM's form, and llama.cpp's: a token is a word."""
        wanted = asked.json
        if "content" in wanted:
            await wire.json({"tokens": list(range(num_words(wanted["content"])))})
            return
        messages = wanted.get("messages") or []
        count = num_words(wanted.get("prompt") or "")
        count += sum(num_words(one["content"]) + 2 for one in messages)
        await wire.json(
            {
                "count": count,
                "max_model_len": self.gauges.max_model_len,
                "tokens": list(range(count)),
            }
        )

    async def _embed(self, asked: Received, wire: Wire) -> None:
        given = asked.json["input"]
        is_one = isinstance(given, str) or isinstance(given[0], int)
        inputs = [given] if is_one else given
        rows = [
            {"object": "embedding", "index": index, "embedding": [float(len(one)), 0.5]}
            for index, one in enumerate(inputs)
        ]
        total = sum(num_words(one) if isinstance(one, str) else len(one) for one in inputs)
        usage = {"prompt_tokens": total, "total_tokens": total}
        await wire.json({"object": "list", "data": rows, "model": MODEL, "usage": usage})


async def _not_found(asked: Received, wire: Wire) -> None:
    await wire.json({"detail": "Not Found"}, 404)


class _Connection(asyncio.Protocol):
    """One keep-alive connection: requests one after another, with a body of a stated length."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._buffer = bytearray()
        self._num_received = 0
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task: asyncio.Task[None] | None = None
        self._asked: Received | None = None
        self._wire: Wire | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one but in name
        self._backend.num_connections += 1
        self._backend._connections.add(self)
        if self._backend._is_stopped:  # it was on its way in when the rest were cut
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._backend.num_connections -= 1
        self._backend._connections.discard(self)
        self._can_write.set()
        if self._asked is not None and self._wire is not None:
            self._asked.is_gone.set()
            self._wire.is_gone.set()

    def cut(self) -> asyncio.Task[None] | None:
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._serve_next()

    def _serve_next(self) -> None:
        if self._asked is None and (asked := self._take()) is not None:
            assert self._transport is not None
            self._asked, self._wire = asked, Wire(self._transport, self._can_write)
            if self._backend.keeps_received:
                self._backend.received.append(asked)
            self._task = asyncio.get_running_loop().create_task(self._serve(asked, self._wire))

    async def _serve(self, asked: Received, wire: Wire) -> None:
        await self._backend.answer(asked, wire)
        asked.is_answered.set()
        self._asked = self._wire = None
        self._serve_next()

    def _take(self) -> Received | None:
        """The first whole request in the buffer."""
        head, mark, _ = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return None
        first, *lines = bytes(head).decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.strip() for name, value in pairs}
        end = len(head) + 4 + int(headers.get("content-length", "0"))
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[len(head) + 4 : end])
        del self._buffer[:end]
        self._num_received += 1
        return Received(method, path, headers, body, self._num_received)


# --- what a good backend says


def num_choices(wanted: Mapping[str, Any]) -> int:
    return int(wanted.get("n") or 1)


def num_words(text: str) -> int:
    return len(text.split())


def words(num_tokens: int) -> list[str]:
    """The output of every generation: w0, w1, …"""
    return [f"w{index}" if index == 0 else f" w{index}" for index in range(num_tokens)]


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def chunk(path: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    head = {"id": "cmpl-fake", "object": kind, "created": 1_700_000_000, "model": MODEL}
    return {**head, "choices": choices, **more}


def piece(path: str, text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    """What a chunk adds to one choice."""
    end = {"index": index, "logprobs": None, "finish_reason": finish}
    return {**end, "delta": {"content": text}} if "chat" in path else {**end, "text": text}


def role(index: int = 0) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def events(
    path: str = GENERATING[0],
    num_tokens: int = 8,
    *,
    n: int = 1,
    usage: str | None = "end",
    prompt_tokens: int = 5,
    finish: str | None = "stop",
    is_done: bool = True,
) -> Iterator[bytes]:
    """A whole stream. `usage`: in a chunk at the `end`, in the last `finish` chunk, or on `every`.

    The last token of a choice carries its finish_reason. `finish=None`: it never says so.
    """
    if "chat" in path:
        yield event(chunk(path, [role(index) for index in range(n)]))
    for position, word in enumerate(words(num_tokens)):
        is_last = position == num_tokens - 1
        for index in range(n):
            more: dict[str, Any] = {}
            counted = position * n + index + 1
            if usage == "every" or (usage == "finish" and is_last and index == n - 1):
                more["usage"] = usage_of(prompt_tokens, counted)
            reason = finish if is_last else None
            yield event(chunk(path, [piece(path, word, index, reason)], **more))
    if usage in ("end", "every"):
        yield event(chunk(path, [], usage=usage_of(prompt_tokens, n * num_tokens)))
    if is_done:
        yield DONE


@lru_cache(maxsize=64)
def ordinary_events(path: str, num_tokens: int, n: int, has_usage: bool) -> tuple[bytes, ...]:
    """Encoded once, so that a benchmark does not measure this."""
    return tuple(events(path, num_tokens, n=n, usage="end" if has_usage else None))


def whole_answer(path: str, num_tokens: int, n: int = 1) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    text = "".join(words(num_tokens))
    content: dict[str, Any] = {"text": text}
    if "chat" in path:
        content = {"message": {"role": "assistant", "content": text}}
    choices = [
        {"index": index, "logprobs": None, "finish_reason": "stop", **content} for index in range(n)
    ]
    kind = "chat.completion" if "chat" in path else "text_completion"
    return {**chunk(path, choices), "object": kind, "usage": usage_of(5, n * num_tokens)}


def vllm_metrics(gauges: Gauges) -> str:
    """A page in the form that vLLM writes."""
    name = f'engine="0",model_name="{MODEL}"'
    config = f'block_size="{gauges.block_size}",cache_dtype="auto",engine="0"'
    config += f',num_gpu_blocks="{gauges.num_blocks}"'
    return f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{name}}} {float(gauges.running)}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{name}}} {float(gauges.waiting)}
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{name}}} {gauges.kv_usage}
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{config}}} 1.0
"""


# --- what a bad backend does


def says(*parts: bytes, is_complete: bool = True) -> Script:
    """200, these bytes as they are, and the end of the body."""

    async def script(asked: Received, wire: Wire) -> None:
        await wire.head()
        for part in parts:
            await wire.send(part)
        if is_complete:
            await wire.end()
        else:
            wire.drop()

    return script


def streams(num_tokens: int = 8, *, split: int | None = None, **shape: Any) -> Script:
    """`events(...)`, in pieces of `split` bytes if given; fields that it shapes pass through."""

    async def script(asked: Received, wire: Wire) -> None:
        await wire.head()
        content = b"".join(events(asked.path, num_tokens, n=num_choices(asked.json), **shape))
        await wire.send_split(content, split or len(content))
        await wire.end()

    return script


def begins(num_events: int, then: Callable[[Wire], Awaitable[None] | None]) -> Script:
    """The first events of an ordinary stream (the first one is the role), then something else."""

    async def script(asked: Received, wire: Wire) -> None:
        await wire.head()
        for one in itertools.islice(events(asked.path, 1000), num_events):
            await wire.send(one)
            await asyncio.sleep(0)
        done = then(wire)
        if done is not None:
            await done

    return script


def fails(status: int, content: Any = None, headers: Mapping[str, str] | None = None) -> Script:
    """An error with a JSON body, in OpenAI's form unless `content` says otherwise."""

    async def script(asked: Received, wire: Wire) -> None:
        error = {"message": f"told to say {status}", "type": "x", "param": None, "code": "y"}
        await wire.json({"error": error} if content is None else content, status, headers)

    return script


async def never_answers(asked: Received, wire: Wire) -> None:
    """Takes the request and says nothing, not even a status."""
    await wire.stall()


async def hangs_up(asked: Received, wire: Wire) -> None:
    """Closes instead of answering."""
    wire.drop()


async def never_ends(asked: Received, wire: Wire) -> None:
    """A token every 5 ms for ever."""
    await wire.head()
    for index in itertools.count():
        if wire.is_gone.is_set():
            return
        await wire.send(event(chunk(asked.path, [piece(asked.path, f" w{index}")])))
        await wire.pause(0.005)


def _arguments(given: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--at-once", type=int, default=0)
    return parser.parse_args(None if given is None else list(given))


async def _serve(port: int, num_tokens: int, delay_s: float, num_at_once: int) -> None:
    backend = FakeBackend(num_tokens=num_tokens, delay_s=delay_s)
    backend.keeps_received = False
    backend.num_at_once = num_at_once
    await backend.listen(port)
    print(f"listening on {backend.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    arguments = _arguments()
    uvloop.run(_serve(arguments.port, arguments.tokens, arguments.delay_s, arguments.at_once))

"""A node's HTTP application without a model and without sockets.

`ScriptedRunner` plays the engine: it answers each request with a script, or leaves it open for the
test to feed. `Caller` calls an ASGI application directly, and can leave, stall and look at what was
sent so far, which HTTP clients cannot.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from kvota.core.clock import ManualClock
from kvota.core.errors import ClientClosed, KvotaError, Outcome, Refusal, Refused
from kvota.core.request import (
    Delta,
    Ended,
    Event,
    FinishReason,
    PromptRead,
    Request,
    TokenLogprobs,
)
from kvota.model.grammar import GrammarCompiler
from kvota.model.template import ChatTemplate
from kvota.model.tokenizer import Tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from kvota.model.tool_format import ToolFormat
from kvota.node.app import create_app
from kvota.node.ports import RequestRecord, RunnerState
from kvota.node.served import ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.tool_dialect import ToolDialect
from kvota.wire.sse import EventReader
from tests.support.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_tokenizer

MODEL = "tiny"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Script = Callable[[Request], Sequence[Event]]


# --- the engine


def says(*pieces: str, finish: FinishReason = FinishReason.STOP, cached: int = 0) -> Script:
    """Each choice says the pieces, one token each, and ends; none when no token is wanted."""

    def script(request: Request) -> Sequence[Event]:
        events: list[Event] = [read(request, cached)]
        if request.max_tokens == 0:
            ends = [Delta(choice, "", finish=FinishReason.LENGTH) for choice in range(request.n)]
            return [*events, *ends, ended(request, output=0, cached=cached)]
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            for choice in range(request.n):
                end = finish if number == last else None
                events.append(delta(request, piece, choice=choice, token=70 + number, finish=end))
        return [*events, ended(request, output=len(pieces) * request.n, cached=cached)]

    return script


def fails(error: KvotaError, outcome: Outcome, *before: str) -> Script:
    """Say the pieces, then end with the error."""

    def script(request: Request) -> Sequence[Event]:
        deltas = [delta(request, piece) for piece in before]
        events: list[Event] = [read(request), *deltas] if before else []
        return [*events, ended(request, outcome=outcome, error=error, output=len(before))]

    return script


def read(request: Request, cached: int = 0) -> PromptRead:
    """Every prompt token with log probability -1, and as many runners-up as asked."""
    wanted = request.prompt_logprobs
    if wanted is None:
        return PromptRead(cached)
    return PromptRead(cached, [logprob(token, wanted) for token in request.prompt[1:]])


def delta(
    request: Request,
    text: str,
    *,
    choice: int = 0,
    token: int = 70,
    finish: FinishReason | None = None,
) -> Delta:
    wanted = request.sampling.logprobs
    return Delta(
        choice=choice,
        text=text,
        token_ids=[token],
        logprobs=[] if wanted is None else [logprob(token, wanted)],
        finish=finish,
    )


def logprob(token: int, num_top: int) -> TokenLogprobs:
    top = [(token, -1.0), *((100 + rank, -2.0 - rank) for rank in range(num_top))][:num_top]
    return TokenLogprobs(token, -1.0, tuple(top))


def ended(
    request: Request,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    error: KvotaError | None = None,
    output: int = 0,
    cached: int = 0,
) -> Ended:
    return Ended(
        outcome=outcome,
        error=error,
        prompt_tokens=len(request.prompt),
        cached_tokens=cached,
        output_tokens=output,
        num_preemptions=0,
        queued_s=0.25,
        first_token_s=0.5 if output else None,
        total_s=1.5,
    )


class ScriptedStream:
    """The events of one request; the test may push more until an Ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_cancelled = False
        self.is_read_to_end = False
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    def push(self, *events: Event) -> None:
        self._events.extend(events)
        self._arrived.set()

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            error = ClientClosed("The client is gone.")
            self.push(ended(self.request, outcome=Outcome.CLIENT_CLOSED, error=error))

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while not self.is_read_to_end:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._events = self._events, []
            first_end = next((i for i, e in enumerate(events) if isinstance(e, Ended)), None)
            if first_end is not None:
                self.is_read_to_end, events = True, events[: first_end + 1]
            yield events


class ScriptedRunner:
    """`script` answers every request at once, one step after another; None leaves them open."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.state = RunnerState.RUNNING
        self.stuck = False
        self.refusal: Refused | None = None
        self.room: int | None = None  # requests accepted before `refusal` is raised
        self.streams: list[ScriptedStream] = []
        self._players: set[asyncio.Task[None]] = set()
        self._submitted = asyncio.Event()

    @property
    def requests(self) -> list[Request]:
        return [stream.request for stream in self.streams]

    async def submitted(self, num_requests: int = 1) -> list[ScriptedStream]:
        """Wait until so many requests have been accepted."""
        while len(self.streams) < num_requests:
            self._submitted.clear()
            async with asyncio.timeout(30):
                await self._submitted.wait()
        return self.streams

    def is_stuck(self, now: float) -> bool:
        return self.stuck

    def submit(self, request: Request) -> ScriptedStream:
        if self.refusal is not None and (self.room is None or len(self.streams) >= self.room):
            raise self.refusal
        stream = ScriptedStream(request)
        self.streams.append(stream)
        self._submitted.set()
        if self.script is not None:
            player = asyncio.ensure_future(_play(stream, self.script(request)))
            self._players.add(player)
            player.add_done_callback(self._players.discard)
        return stream


async def _play(stream: ScriptedStream, events: Iterable[Event]) -> None:
    for event in events:
        stream.push(event)
        if not isinstance(event, Delta) or event.finish is None:
            await asyncio.sleep(0)  # a step of its own


# --- the model and the application


def tiny_served(*, max_model_len: int = 256, **changes: Any) -> ServedModel:
    """The 300-token byte-level tokenizer under ChatML, with real grammars and tool calls."""
    core = tiny_tokenizer()
    tokenizer = Tokenizer(
        TokenizerParts(core=core, eos_id=IM_END_ID, eos_ids=frozenset({IM_END_ID}))
    )
    grammar = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [IM_END_ID])
    facts: dict[str, Any] = {
        "name": MODEL,
        "aliases": ("also-tiny",),
        "created": 1_700_000_000,
        "max_model_len": max_model_len,
        "vocab_size": VOCAB_SIZE,
        "tokenizer": tokenizer,
        "eos_ids": frozenset({IM_END_ID}),
        "template": ChatTemplate(CHATML, bos_token=None, eos_token="<|im_end|>"),
        "grammar": grammar,
        "tooling": ToolDialect(ToolFormat.HERMES, tokenizer, grammar, random.Random(2)),
    }
    return ServedModel(**{**facts, **changes})


@dataclass
class Node:
    """An application with all of its surroundings in the test's hands."""

    app: ASGIApp
    runner: ScriptedRunner
    clock: ManualClock
    served: ServedModel
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def caller(self) -> "Caller":
        return Caller(self.app)

    async def post(self, path: str, body: Any, **headers: str) -> "Reply":
        return await self.caller.request("POST", path, body, headers)

    async def chat(self, text: str = "hi", **fields: Any) -> "Reply":
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> "Reply":
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def get(self, path: str, **headers: str) -> "Reply":
        return await self.caller.request("GET", path, None, headers)


def make_node(
    script: Script | None = None,
    *,
    served: ServedModel | None = None,
    loading: bool = False,
    **settings: Any,
) -> Node:
    """A node on `tiny_served()` whose runner plays `script`; `loading`: its model never comes."""
    runner, clock, records = ScriptedRunner(script), ManualClock(100.0), list[RequestRecord]()
    model = served or tiny_served()

    def when_loaded() -> ServedModel:
        if loading:
            raise Refused(Refusal.ENGINE_RESTARTING, "The model loads.", retry_after_s=5.0)
        return model

    app = create_app(
        served=when_loaded,
        runner=runner,
        settings=HttpSettings(**settings),
        clock=clock,
        record=records.append,
        render_metrics=lambda: b"kvota_up 1\n",
        chance=random.Random(1),
        unix_time=lambda: 1_700_000_123.9,
    )
    return Node(app, runner, clock, model, records)


# --- the client


@dataclass
class Reply:
    """A response as it was sent: `pieces` are the bodies of the single sends."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it has OpenAI's form."""
        body = self.json
        assert set(body) == {"error"}, body
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return error

    @property
    def events(self) -> list[str]:
        """The `data:` values of an event stream, the last one usually [DONE]."""
        return [value.decode() for value in EventReader().feed(self.content)]

    @property
    def chunks(self) -> list[Any]:
        return [msgspec.json.decode(value) for value in self.events if value != "[DONE]"]

    @property
    def comments(self) -> int:
        return sum(line.startswith(b":") for line in self.content.splitlines())


class Call:
    """One request under way."""

    def __init__(
        self, app: ASGIApp, scope: Mapping[str, Any], body: Sequence[bytes], *, is_whole: bool
    ) -> None:
        self.reply = Reply()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._body = list(body)
        self._is_whole = is_whole
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()
        self.task = asyncio.ensure_future(app(dict(scope), self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def until(self, met: Callable[[Reply], bool]) -> None:
        """Wait until what was sent meets a condition."""
        async with self._changed:
            async with asyncio.timeout(30):
                await self._changed.wait_for(lambda: met(self.reply))

    async def end(self) -> Reply:
        """Wait until the application has ended the request."""
        async with asyncio.timeout(30):
            await self.task
        return self.reply

    async def _receive(self) -> Message:
        if self._body:
            part = self._body.pop(0)
            more = bool(self._body) or not self._is_whole
            return {"type": "http.request", "body": part, "more_body": more}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        async with self._changed:
            self._note(message)
            self._changed.notify_all()

    def _note(self, message: Message) -> None:
        reply = self.reply
        if message["type"] == "http.response.start":
            assert reply.status == 0, "a response starts once"
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        assert reply.status, "a body comes after its start"
        assert not reply.is_complete, "nothing follows the last piece"
        if message.get("body"):
            reply.pieces.append(message["body"])
        reply.is_complete = not message.get("more_body", False)


class Caller:
    """Calls an ASGI application like a client that has all the time in the world."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def begin(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None,
        *, is_whole: bool = True,
    ) -> Call:  # fmt: skip
        """Start a request. `body` is JSON to be, or bytes, or a list of byte parts.

        With `is_whole` False more of the body is announced and never comes.
        """
        parts: list[bytes]
        if isinstance(body, list) and body and all(isinstance(part, bytes) for part in body):
            parts = body
        else:
            parts = [_encoded(body)]
        fields = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").lower().encode(), value.encode("latin-1"))
                for name, value in fields.items()
                if value
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Call(self._app, scope, parts, is_whole=is_whole)

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and wait for the end of its response."""
        return await self.begin(method, path, body, headers).end()

    @asynccontextmanager
    async def open(self, path: str, body: Any, **headers: str) -> AsyncIterator[Call]:
        """A POST that is made to end when the block does."""
        call = self.begin("POST", path, body, headers)
        try:
            yield call
        finally:
            call.may_send.set()
            call.leave()
            await call.end()


def _encoded(body: Any) -> bytes:
    if body is None:
        return b""
    return body if isinstance(body, bytes) else msgspec.json.encode(body)

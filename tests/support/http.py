"""A node's HTTP application without a model and without sockets.

`ScriptedRunner` plays the engine: it answers each request with a script, or leaves it open for the
test to feed.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

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
from kvota.node.comeback import Comeback
from kvota.node.ports import Phase, RequestRecord, RequestView, RunnerState, Waiting
from kvota.node.readiness import Stall
from kvota.node.served import ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.tool_dialect import ToolDialect
from tests.support.asgi_caller import Caller, Reply
from tests.support.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_tokenizer

MODEL = "tiny"
LOAD_S, DRAIN_TIMEOUT_S = 50.0, 25.0  # what the node says of itself
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
        kv_block_s=4.0,
    )


class ScriptedStream:
    """The events of one request; the test may push more until an Ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_cancelled = False
        self.is_read_to_end = False
        self.place: Waiting | None = None
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

    def waits(self) -> Waiting | None:
        return self.place

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
        self.last_step_s = 0.0
        self.looks: asyncio.Event | None = None  # views come only when it is set
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
            async with asyncio.timeout(60):
                await self._submitted.wait()
        return self.streams

    def is_stuck(self, now: float) -> bool:
        return self.stuck

    def stalled_s(self, now: float) -> float:
        return now - self.last_step_s

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

    async def views(self) -> list[RequestView]:
        if self.looks is not None:
            await self.looks.wait()
        return [view_of(stream) for stream in self.streams if not stream.is_read_to_end]

    def cancel(self, request_id: str) -> bool:
        """A request ends only once."""
        meant = [stream for stream in self.streams if stream.request.id == request_id]
        live = [s for s in meant if not s.is_cancelled and not s.is_read_to_end]
        for stream in live:
            stream.cancel()
        return bool(live)


def view_of(stream: ScriptedStream) -> RequestView:
    """A request in line while it has a place, a quarter of its prompt read otherwise."""
    request, place = stream.request, stream.place
    return RequestView(
        id=request.id,
        client_id=request.labels["client_id"],
        tenant="team-a",
        model=MODEL,
        lane="short",
        band="interactive",
        phase=Phase.PREFILL if place is None else Phase.QUEUED,
        age_s=1.23456,
        position=place.position if place else None,
        eta_s=place.eta_s if place else None,
        eta_basis=(place.latest_by or "forecast") if place else None,
        why=place.why if place else None,
        prompt_tokens=len(request.prompt),
        computed_tokens=0 if place else len(request.prompt) // 4,
        cached_tokens=0,
        output_tokens=0,
        max_tokens=request.max_tokens,
        num_choices=request.n,
        tokens_per_s=None if place else 12.3456,
        kv_blocks=0 if place else 3,
        num_preemptions=0,
    )


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
        "hidden_ids": tokenizer.special_ids,
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
    stalls: list[Stall] = field(default_factory=list)

    @property
    def caller(self) -> Caller:
        return Caller(self.app)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.caller.request("POST", path, body, headers)

    async def chat(self, text: str = "hi", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.caller.request("GET", path, None, headers)


def make_node(
    script: Script | None = None,
    *,
    served: ServedModel | None = None,
    loading: bool = False,
    **settings: Any,
) -> Node:
    """A node on `tiny_served()` whose runner plays `script`; `loading`: its model never comes."""
    runner, clock = ScriptedRunner(script), ManualClock(100.0)
    records, stalls = list[RequestRecord](), list[Stall]()
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
        comeback=Comeback(clock, load_s=LOAD_S, drain_timeout_s=DRAIN_TIMEOUT_S),
        record=records.append,
        render_metrics=lambda: b"kvota_up 1\n",
        chance=random.Random(1),
        unix_time=lambda: 1_700_000_123.9,
        report_stall=stalls.append,
    )
    return Node(app, runner, clock, model, records, stalls)

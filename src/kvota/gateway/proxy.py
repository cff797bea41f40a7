"""The life of one generating request in the gateway, from its first byte to its record.

    door ─▶ body ─▶ route ─▶ limits ─▶ filter ─▶ attempt · attempt · … ─▶ end, exactly once
      │       │        │        │         │           │
      └───────┴────────┴────────┴─────────┴───────────┴──▶ an error is answered once, in one place

At the end limits are corrected, usage is kept, abuse is noted and the record is written, whatever
happened.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from kvota.core.clock import Clock
from kvota.core.errors import ClientClosed, KvotaError, Outcome, RequestCancelled
from kvota.edge.arrival import Arrival, Arrivals, client_id, id_headers
from kvota.edge.exchange import Exchange
from kvota.edge.problems import (
    RawHeaders,
    error_code,
    error_headers,
    error_response,
    forget_frames,
    our_mistake,
    outcome_of,
)
from kvota.edge.settings import EdgeSettings
from kvota.gateway.attempts import Asked, Body
from kvota.gateway.caller import Caller
from kvota.gateway.calls import Call, Work, outcome_of_code
from kvota.gateway.dispatch import Dispatcher
from kvota.gateway.entrance import Entrance, Entry, standing_headers, texts_of
from kvota.gateway.filters.content import FilterFound
from kvota.gateway.live import Live, Rules, going_away
from kvota.gateway.node_passage import PassedOn
from kvota.telemetry.journal import PREFIX_BYTES, PrefixNumbers
from kvota.telemetry.trace import TraceContext
from kvota.wire import checks, sse
from kvota.wire.decode import BodyDecoder
from kvota.wire.openai import ChatRequest, CompletionRequest

T = TypeVar("T", ChatRequest, CompletionRequest)
SHUTDOWN_STATUS: Final = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all endpoints of one gateway share."""

    live: Live
    entrance: Entrance
    dispatcher: Dispatcher
    settings: EdgeSettings
    clock: Clock
    chance: Random
    arrivals: Arrivals
    record: Callable[[Call], None]
    keep_usage: Callable[[Call], None]
    prefix_numbers: PrefixNumbers | None = None  # for a journal
    is_traced: bool = False


class Endpoint(ABC):
    """An ASGI application for one path: from the request's first byte to its record."""

    def __init__(self, name: str, parts: Parts, work: Work = Work.GENERATION) -> None:
        self._name = name
        self._parts = parts
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._parts
        exchange = Exchange(scope, receive, send, parts.settings)
        call = new_call(self._name, scope, exchange, parts)
        call.work = self._work
        failure: BaseException | None = None
        try:
            async with parts.live.serving():
                await self._serve(exchange, call)
        except KvotaError as error:
            failure = told(error, exchange)
            note_failure(call, failure, is_stalled=exchange.is_stalled)
            await answer_failure(exchange, failure, parts.chance)
            forget_frames(error)
        except BaseException as error:  # noted for the record, handled by whoever runs us
            failure = error
            note_failure(call, error)
            if isinstance(error, Exception) and not exchange.is_started:
                await answer_failure(exchange, our_mistake(), parts.chance)
            raise
        finally:
            call.ended_s = parts.clock.now()
            call.keep_usage()
            parts.record(call)

    @abstractmethod
    async def _serve(self, exchange: Exchange, call: Call) -> None:
        """Answer it, or raise what its client is told."""

    async def _let_in(self, exchange: Exchange, call: Call) -> tuple[Caller, Arrival, bytes]:
        """Who asks, when, and what: the door comes before the body. Raises KvotaError."""
        parts = self._parts
        if parts.live.is_draining:
            raise going_away()
        caller = parts.entrance.admit(exchange.request_headers, call)
        arrival = parts.arrivals.make(call.id, call.arrived_s, exchange.request_headers)
        call.band = caller.band(arrival.band)
        return caller, arrival, await exchange.body()


class GatewayEndpoint(Endpoint, Generic[T]):
    """One path that generates."""

    def __init__(self, name: str, path: str, kind: type[T], parts: Parts) -> None:
        super().__init__(name, parts)
        self._path = path
        self._decoder: BodyDecoder[T] = BodyDecoder(kind)

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        parts = self._parts
        caller, arrival, content = await self._let_in(exchange, call)
        rules = parts.live.now  # not before: a reload may come while a body does
        async with exchange.watched():
            body = self._decoder.decode(content)
            asked = Asked(
                path=self._path, content=content, body=body, arrival=arrival, caller=caller,
                client_headers=exchange.request_headers,
                max_tokens=_max_tokens(body), num_choices=_num_choices(body),
                is_stream=bool(body.stream),
            )  # fmt: skip
            call.is_stream = asked.is_stream
            call.num_choices, call.max_tokens = asked.num_choices, asked.max_tokens
            if parts.prefix_numbers is not None and len(content) >= PREFIX_BYTES:
                call.prefix = parts.prefix_numbers.of(texts_of(body))
            await self._answer(asked, exchange, call, rules)

    async def _answer(self, asked: Asked, exchange: Exchange, call: Call, rules: Rules) -> None:
        entry = await self._enter(asked, exchange, call, rules)
        try:
            await self._parts.dispatcher.answer(entry.route, asked, exchange, call, rules)
        finally:
            await entry.leave(call)

    async def _enter(self, asked: Asked, exchange: Exchange, call: Call, rules: Rules) -> Entry:
        try:
            entry = await self._parts.entrance.enter(asked, call, rules, self._check)
        except KvotaError as error:
            exchange.headers += standing_headers(error)
            raise
        exchange.headers += entry.headers
        return entry

    @staticmethod
    def _check(body: Body) -> None:
        """What the node would say first of a body whose model nobody knows."""
        if isinstance(body, ChatRequest):
            checks.check_chat(body)
        else:
            checks.check_completion(body)


def new_call(name: str, scope: Scope, exchange: Exchange, parts: Parts) -> Call:
    """A Call for what has just arrived, and its id on every answer."""
    own = parts.arrivals.new_id()
    client = scope.get("client")
    call = Call(
        id=own,
        client_id=client_id(exchange.request_headers) or own,
        endpoint=name,
        arrived_s=parts.clock.now(),
        address=client[0] if client else None,
        keep=parts.keep_usage,
    )
    if parts.is_traced:
        given = exchange.request_headers.get(b"traceparent", b"").decode("latin-1")
        call.trace = TraceContext.begin(given, parts.chance)
    exchange.headers += id_headers(call.client_id)
    return call


def told(error: KvotaError, exchange: Exchange) -> KvotaError:
    """The error as its client hears it: work that stops under one who stayed was cancelled."""
    if isinstance(error, ClientClosed) and not exchange.is_gone:
        return RequestCancelled("The request was cancelled by DELETE.")
    return error


def note_failure(call: Call, failure: BaseException, *, is_stalled: bool = False) -> None:
    """Status, code and outcome, for the record."""
    if isinstance(failure, PassedOn):
        call.status, call.code = failure.status, failure.code
        call.outcome = outcome_of_code(failure.status, failure.code)
    elif isinstance(failure, ClientClosed):
        call.status, call.code = failure.status, failure.code
        call.outcome = Outcome.SLOW_READER if is_stalled else Outcome.CLIENT_CLOSED
    elif isinstance(failure, KvotaError):
        call.status, call.code = failure.status, error_code(failure)
        call.outcome = outcome_of(failure)
        call.why = failure.rule if isinstance(failure, FilterFound) else call.why
    elif isinstance(failure, Exception):
        call.status, call.code = KvotaError.status, KvotaError.code
        call.outcome = Outcome.ENGINE_ERROR
    else:
        call.status, call.code, call.outcome = SHUTDOWN_STATUS, "shutdown", Outcome.SHUTDOWN


async def answer_failure(exchange: Exchange, error: KvotaError, chance: Random) -> None:
    """Say what went wrong, in whatever way is still possible."""
    if exchange.is_gone:
        return
    with suppress(ClientClosed):
        if exchange.is_started:
            event = sse.EventBuffer()
            event.add(error_response(error))
            await exchange.write(event.take(), last=True)
        elif isinstance(error, PassedOn):
            await exchange.send_whole(error.status, error.content, error.headers)
        else:
            headers: RawHeaders = error_headers(error, chance)
            await exchange.respond(error.status, error_response(error), headers)


def _max_tokens(body: Body) -> int | None:
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _num_choices(body: Body) -> int:
    n = body.n or 1
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, list):
        are_ids = bool(body.prompt) and isinstance(body.prompt[0], int)
        return n if are_ids else n * max(1, len(body.prompt))
    return n

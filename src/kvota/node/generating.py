"""The life of one generating request over HTTP, from its first byte to its record.

read body ─▶ understand ─▶ submit ─▶ stream or collect ─▶ record (always, exactly once)
   │             │            │            │
   └─────────────┴────────────┴────────────┴──▶ an error is answered once, in one place
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from kvota.core.clock import Clock
from kvota.core.errors import ClientClosed, KvotaError, Outcome, RequestCancelled
from kvota.core.request import Delta, PromptRead, Request
from kvota.edge import trust
from kvota.edge.arrival import Arrival, Arrivals, client_id, id_headers
from kvota.edge.exchange import Exchange, beside
from kvota.edge.problems import (
    RawHeaders,
    error_code,
    error_headers,
    error_response,
    forget_frames,
    outcome_of,
)
from kvota.engine.lateness import not_complete
from kvota.node.answer import Chunk, coalesced, usage_of
from kvota.node.generation import Generation, Tally
from kvota.node.intake import Prepared
from kvota.node.ports import RecordRequest, RequestRecord, Runner
from kvota.node.settings import HttpSettings
from kvota.wire import sse
from kvota.wire.decode import BodyDecoder
from kvota.wire.responses import Usage

T = TypeVar("T", bound=msgspec.Struct)

# The engine ends what is late between two steps; this much later the answer goes out without it.
ENGINE_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What all endpoints of one process share."""

    runner: Runner
    settings: HttpSettings
    clock: Clock
    chance: Random
    arrivals: Arrivals
    record: RecordRequest
    lane_of: Callable[[Request], str]


class GeneratingEndpoint(Generic[T]):
    """An ASGI application for one path. `prepare` turns a decoded body into engine requests."""

    def __init__(
        self, name: str, kind: type[T], prepare: Callable[[T, Arrival], Awaitable[Prepared]],
        edge: Edge,
    ) -> None:  # fmt: skip
        self._name = name
        self._decoder = BodyDecoder(kind)
        self._prepare = prepare
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        edge = self._edge
        exchange = Exchange(scope, receive, send, edge.settings)
        service = _Service(self._name, exchange, edge)
        failure: BaseException | None = None
        try:
            await self._serve(exchange, service)
        except KvotaError as error:
            failure = service.told(error)
            await service.answer_failure(failure)
            forget_frames(error)
        except BaseException as error:  # noted for the record, handled by whoever runs us
            failure = error
            raise
        finally:
            edge.record(service.record(failure))

    async def _serve(self, exchange: Exchange, service: "_Service") -> None:
        edge = self._edge
        arrival = edge.arrivals.make(service.id, service.arrived_s, exchange.request_headers)
        service.arrival = arrival
        content = await exchange.body()
        async with exchange.watched():
            arrival = msgspec.structs.replace(arrival, num_bytes=len(content))
            body = self._decoder.decode(content)
            del content
            prepared = await self._prepare(body, arrival)
            del body  # both may be megabytes
            if exchange.is_gone:
                raise ClientClosed("The client went away before its request was accepted.")
            service.prepared = prepared
            service.submitted_s = edge.clock.now()
            service.generation = generation = Generation.submit(edge.runner, prepared.requests)
            exchange.on_gone = generation.cancel
            try:
                if not prepared.is_stream:
                    await service.collect(prepared, generation)
                    return
                async with beside(exchange.keep_alive(lambda: _remark(generation))):
                    await service.stream(prepared, generation)
            finally:
                generation.cancel()  # for the case that we ourselves are being cancelled


class _Service:
    """Serves one request and remembers what its record needs."""

    def __init__(self, endpoint: str, exchange: Exchange, edge: Edge) -> None:
        self._endpoint = endpoint
        self._exchange = exchange
        self._edge = edge
        self.arrived_s = edge.clock.now()
        self.id = edge.arrivals.new_id()
        self._client_id = client_id(exchange.request_headers) or self.id
        self.arrival: Arrival | None = None
        self.prepared: Prepared | None = None
        self.generation: Generation | None = None
        self.submitted_s: float | None = None
        exchange.headers += id_headers(self._client_id)

    async def collect(self, prepared: Prepared, generation: Generation) -> None:
        """Wait for the whole answer, then send it."""
        answer = prepared.answer
        chunks: list[Chunk] = []
        async with self._in_time(prepared):
            async for index, events in generation.events():
                for event in events:
                    chunks.extend(answer.chunks(index, event))
        tally = generation.tally
        body = answer.completed(chunks, self._usage(prepared, generation))
        headers = _measured(tally.cached_tokens, tally.queued_s or 0.0)
        if self._edge.settings.trusts_gateway:
            headers.append((trust.USAGE, self._report(prepared).encode()))
        await self._exchange.respond(200, body, headers)

    async def stream(self, prepared: Prepared, generation: Generation) -> None:
        """Send what there is as it comes: one write for all events of a step.

        Nothing goes out before the first token, so that a failure until then is an HTTP error;
        only a heartbeat opens the stream earlier.
        """
        exchange, answer = self._exchange, prepared.answer
        buffer, meter = sse.EventBuffer(), _Meter(prepared)
        has_begun = False
        for chunk in answer.opening():
            meter.stamp(chunk)
            buffer.add(chunk)
        async with self._in_time(prepared):
            async for index, events in generation.events():
                for event in coalesced(events):
                    meter.see(event)
                    for chunk in answer.chunks(index, event):
                        meter.stamp(chunk)
                        buffer.add(chunk)
                if not has_begun and any(isinstance(event, Delta) for event in events):
                    has_begun = True
                    exchange.headers += _measured(meter.cached_tokens, meter.queued_s)
                if has_begun and buffer:
                    with suppress(ClientClosed):  # on_gone has cancelled; read on to the end
                        await exchange.write(buffer.take())
        if prepared.wants_usage:
            buffer.add(answer.usage_chunk(self._usage(prepared, generation)))
        buffer.add_done()
        await exchange.write(buffer.take() + self._last_comment(), last=True)

    @asynccontextmanager
    async def _in_time(self, prepared: Prepared) -> AsyncIterator[None]:
        """Raises RequestTimeout when the engine, stuck in a step, cannot end the request itself."""
        deadline_s = prepared.requests[0].deadline_s
        assert deadline_s is not None
        left_s = deadline_s - self._edge.clock.now()
        try:
            async with asyncio.timeout(max(left_s, 0.0) + ENGINE_GRACE_S):
                yield
        except TimeoutError:
            raise not_complete(deadline_s - self.arrived_s) from None

    def told(self, error: KvotaError) -> KvotaError:
        """The error as its client hears it: work that stops under one who stayed was cancelled.

        A client that left, or read nothing for too long, is gone by the time its error comes up.
        """
        if isinstance(error, ClientClosed) and not self._exchange.is_gone:
            return RequestCancelled("The request was cancelled by DELETE.")
        return error

    async def answer_failure(self, error: KvotaError) -> None:
        """Say what went wrong, in whatever way is still possible."""
        exchange = self._exchange
        if exchange.is_gone:
            return
        body = error_response(error)
        with suppress(ClientClosed):
            if exchange.is_started:
                event = sse.EventBuffer()
                event.add(body)
                await exchange.write(event.take() + self._last_comment(), last=True)
            else:
                headers = [*error_headers(error, self._edge.chance), *self._reported()]
                await exchange.respond(error.status, body, headers)

    def record(self, failure: BaseException | None) -> RequestRecord:
        """What is kept of the request once it is over."""
        arrival, prepared, generation = self.arrival, self.prepared, self.generation
        tally = generation.tally if generation else None
        status, code, outcome = _ending(failure, generation, is_stalled=self._exchange.is_stalled)
        return RequestRecord(
            request_id=self._client_id,
            endpoint=self._endpoint,
            model=prepared.model if prepared else "unknown",
            tenant=arrival.tenant if arrival else "unknown",
            lane=self._lane(),
            band=arrival.band.name.lower() if arrival else "unknown",
            outcome=outcome,
            status=status,
            code=code,
            streamed=prepared.is_stream if prepared else False,
            num_choices=prepared.num_choices if prepared else 0,
            prompt_tokens=tally.prompt_tokens if tally else 0,
            read_tokens=tally.read_tokens if tally else 0,
            cached_tokens=tally.cached_tokens if tally else 0,
            output_tokens=tally.output_tokens if tally else 0,
            num_preemptions=tally.num_preemptions if tally else 0,
            kv_block_s=tally.kv_block_s if tally else 0.0,
            door_s=None if self.submitted_s is None else self.submitted_s - self.arrived_s,
            queued_s=tally.queued_s if tally else None,
            first_token_s=tally.first_token_s if tally else None,
            decode_s=tally.decode_s if tally else None,
            time_per_output_token_s=tally.time_per_output_token_s if tally else None,
            total_s=self._edge.clock.now() - self.arrived_s,
            traceparent=_header(self._exchange, b"traceparent"),
        )

    def _lane(self) -> str:
        if self.prepared is None:
            return "unknown"
        return self._edge.lane_of(max(self.prepared.requests, key=lambda r: len(r.prompt)))

    def _last_comment(self) -> bytes:
        """For a gateway, what the stream took; nothing for anybody else."""
        if not self._edge.settings.trusts_gateway or self.prepared is None:
            return b""
        return self._report(self.prepared).comment()

    def _reported(self) -> RawHeaders:
        """The same as a header of an error."""
        if not self._edge.settings.trusts_gateway or self.prepared is None:
            return []
        return [(trust.USAGE, self._report(self.prepared).encode())]

    def _report(self, prepared: Prepared) -> trust.UsageReport:
        tally = self.generation.tally if self.generation else Tally()
        band = prepared.requests[0].band
        course = trust.Course(
            lane=self._lane(),
            band=band.name.lower(),
            num_preemptions=tally.num_preemptions,
            kv_block_s=tally.kv_block_s,
            queued_s=tally.queued_s,
            first_token_s=tally.first_token_s,
            time_per_output_token_s=tally.time_per_output_token_s,
        )
        return trust.UsageReport(
            prepared.prompt_tokens, tally.cached_tokens, tally.output_tokens, course
        )

    def _usage(self, prepared: Prepared, generation: Generation) -> Usage:
        tally = generation.tally
        output = tally.output_tokens
        return usage_of(prepared.prompt_tokens, tally.cached_tokens, output)


class _Meter:
    """Counts tokens as they pass, for streams that want usage on the way."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.cached_tokens = 0
        self._output_tokens = 0
        self.queued_s = 0.0

    def see(self, event: PromptRead | Delta) -> None:
        if isinstance(event, PromptRead):
            self.cached_tokens += event.cached_tokens
            self.queued_s = max(self.queued_s, event.queued_s)
        else:
            self._output_tokens += len(event.token_ids)

    def stamp(self, chunk: Chunk) -> None:
        """Without `include_usage` chunks have no such field; with it, null until the last one."""
        if self._prepared.wants_running_usage:
            chunk.usage = usage_of(
                self._prepared.prompt_tokens, self.cached_tokens, self._output_tokens
            )
        elif self._prepared.wants_usage:
            chunk.usage = None


def _header(exchange: Exchange, name: bytes) -> str | None:
    return exchange.request_headers.get(name, b"").decode("latin-1") or None


def _remark(generation: Generation) -> str:
    """What a comment says while nothing else can be said."""
    place = generation.waits()
    if place is None:
        return "heartbeat"
    return sse.place_in_line(place.position, place.eta_s, place.latest_by)


def _measured(cached_tokens: int, queued_s: float) -> RawHeaders:
    """The headers that tell what the request met on its way to the first token."""
    return [
        (b"x-kvota-cached-tokens", b"%d" % cached_tokens),
        (b"x-kvota-queue-ms", b"%d" % round(1000 * queued_s)),
    ]


def _ending(
    failure: BaseException | None, generation: Generation | None, *, is_stalled: bool
) -> tuple[int, str | None, Outcome]:
    """HTTP status, error code and outcome."""
    if failure is None:
        return 200, None, Outcome.COMPLETED
    if isinstance(failure, asyncio.CancelledError):
        return 499, "shutdown", Outcome.SHUTDOWN
    if isinstance(failure, ClientClosed):
        outcome = Outcome.SLOW_READER if is_stalled else Outcome.CLIENT_CLOSED
        return failure.status, failure.code, outcome
    if not isinstance(failure, KvotaError):
        return KvotaError.status, KvotaError.code, Outcome.ENGINE_ERROR
    outcome = outcome_of(failure)
    if generation is not None and generation.outcome not in (None, Outcome.COMPLETED):
        outcome = generation.outcome
    return failure.status, error_code(failure), outcome

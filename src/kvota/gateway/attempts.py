"""One attempt of one request on one backend, for both kinds of backend.

    own kind   body as it came (renamed where the node knows another name) ─▶ node_passage
    foreign    counted ─▶ the desk kept here grants ─▶ relay, which counts what comes back

Either way the attempt ends with the client's answer, or with an exception that says what it means
for the backend (`verdict_of`).
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import ClientClosed, NotFound, Refusal, Refused
from kvota.edge.arrival import Arrival
from kvota.edge.exchange import Exchange, beside
from kvota.edge.trust import told
from kvota.gateway.backends import Backend
from kvota.gateway.caller import Caller
from kvota.gateway.calls import Call
from kvota.gateway.filters.content import Filters, OutputGuard
from kvota.gateway.live import Rules
from kvota.gateway.node_passage import PassedOn, pass_figures, pass_on
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.policy.affinity import PrefixChain, prefix_chain
from kvota.gateway.policy.retries import Failure, failure_of_status
from kvota.gateway.question import Question
from kvota.gateway.routes import Target
from kvota.gateway.upstream.connection import UpstreamReply
from kvota.gateway.upstream.counting import estimate
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind, RejectedByBackend
from kvota.gateway.upstream.foreign_desk import ticket_of
from kvota.gateway.upstream.outgoing import outgoing_body, outgoing_headers, renamed_body
from kvota.gateway.upstream.passage import Ask
from kvota.gateway.upstream.place import Place
from kvota.gateway.upstream.relay import Relay, while_client_stays
from kvota.wire.openai import ChatRequest, CompletionRequest

Body = ChatRequest | CompletionRequest
_BYTES_PER_TOKEN: Final = 4  # of a body, for a price that only compares replicas

_FAILURES: Final[Mapping[FailureKind, Failure]] = {
    FailureKind.CONNECT: Failure.UNREACHABLE,
    FailureKind.FIRST_BYTE_TIMEOUT: Failure.SILENT,
    FailureKind.IDLE_TIMEOUT: Failure.SILENT,
    FailureKind.CUT: Failure.LOST,
    FailureKind.MALFORMED: Failure.GARBLED,
    FailureKind.TOO_LARGE: Failure.GARBLED,
    FailureKind.FULL: Failure.BUSY,
    FailureKind.CREDENTIALS: Failure.MISCONFIGURED,
    FailureKind.ERROR_EVENT: Failure.ERROR,
}


class Asked(msgspec.Struct, kw_only=True):
    """A request, read and understood as far as the gateway needs to. Never changed."""

    path: str
    content: bytes
    body: Body
    arrival: Arrival
    caller: Caller
    client_headers: Mapping[bytes, bytes]
    max_tokens: int | None  # of one choice; None: the client leaves it to us
    num_choices: int  # over all prompts
    is_stream: bool
    _estimate: int | None = None  # once somebody wants it

    @property
    def estimated_prompt_tokens(self) -> int:
        """By its bytes: for the limits, and for a desk here."""
        if self._estimate is None:
            self._estimate = estimate(self.content)
        return self._estimate

    # --- as a Question

    @property
    def may_fall_back(self) -> bool:
        return self.caller.may_fall_back

    @property
    def ticket_tokens(self) -> int:
        output = self.max_tokens or 0
        return len(self.content) // _BYTES_PER_TOKEN + self.num_choices * output

    def prefix(self) -> PrefixChain:
        """Of the body's bytes as they are: equal beginnings of prompts are equal ones there."""
        return prefix_chain(self.content.decode("utf-8", "replace"), self.body.cache_salt or "")

    def attempt(
        self, target: Target, call: Call, exchange: Exchange, clock: Clock, rules: Rules
    ) -> "Attempt":
        assumed = rules.settings.output_tokens_assumed
        return Attempt(
            target, self, call, exchange, clock, rules.filters, output_tokens_assumed=assumed
        )


class Attempt:
    """`run` it once. `call` learns what came back, also when it broke."""

    def __init__(
        self,
        target: Target,
        asked: Asked,
        call: Call,
        exchange: Exchange,
        clock: Clock,
        filters: Filters,
        *,
        output_tokens_assumed: int,
    ) -> None:
        self._target = target
        self._asked = asked
        self._call = call
        self._exchange = exchange
        self._clock = clock
        self._filters = filters
        self._output_tokens_assumed = output_tokens_assumed
        self._relay: Relay | None = None  # once the backend answers

    @property
    def has_sent(self) -> bool:
        if self._relay is not None:
            return self._relay.has_sent
        return self._asked.is_stream and self._call.first_token_s is not None

    async def run(self) -> None:
        """Raises what `verdict_of` judges, and whatever is the request's own fault."""
        backend = self._target.backend
        backend.num_open += 1
        try:
            if backend.is_own_kind and not self._filters.has_output:
                await self._through_node()
            else:
                await self._through_relay()
        finally:
            backend.num_open -= 1
            if self._call.is_owed and not self._call.prompt_tokens:
                self._call.prompt_tokens = self._asked.estimated_prompt_tokens  # it never said

    # --- a node of ours: as it is

    async def _through_node(self) -> None:
        target, asked = self._target, self._asked
        upstream = target.backend.upstream
        assert isinstance(upstream, NodeUpstream)
        content = asked.content
        if asked.body.model != target.model:
            content = renamed_body(content, model=target.model)
        call, headers = self._call, headers_to(target.backend, asked, self._call)
        async with while_client_stays(self._exchange):
            with call.at_work():
                async with upstream.ask("POST", asked.path, content, headers) as reply:
                    await pass_on(reply, self._exchange, call, self._clock, self._begun)

    # --- any backend: counted here, or read for the filter

    async def _through_relay(self) -> None:
        exchange, asked, target = self._exchange, self._asked, self._target
        backend = target.backend
        async with while_client_stays(exchange), self._bridged():
            max_tokens = await self._price()
            is_ours = asked.max_tokens is None and max_tokens is not None
            also = {"max_tokens": max_tokens} if is_ours else {}
            body = outgoing_body(asked.content, model=target.model, kind=backend.kind, also=also)
            headers = headers_to(backend, asked, self._call)
            async with self._admitted(max_tokens) as place:
                if place is not None:
                    self._note_place(place)
                with self._call.at_work():
                    async with backend.upstream.open(
                        asked.path, body, headers, deadline_s=asked.arrival.deadline_s
                    ) as reply:
                        await self._read(reply, place, max_tokens)

    async def _read(
        self, reply: UpstreamReply, place: Place | None, max_tokens: int | None
    ) -> None:
        if self._target.backend.is_own_kind:
            pass_figures(reply, self._exchange, self._call)
        relay = self._relay = Relay(
            reply,
            self._ask(max_tokens),
            self._clock,
            watcher=place,
            text_filter=_Guards(self._filters) if self._filters.has_output else None,
        )
        try:
            await self._relayed(relay)
        finally:
            self._learn(relay)
            if place is not None:
                place.tally = relay.tally

    async def _price(self) -> int | None:
        """Count the prompt; returns the most tokens that one choice may have.

        None: its own desk decides that.
        """
        asked, backend = self._asked, self._target.backend
        if backend.desk is None:
            return asked.max_tokens
        tokens = asked.estimated_prompt_tokens
        if tokens > backend.estimate_max_tokens:
            tokens = await self._counted(tokens)
        self._call.prompt_tokens = tokens
        left = max(backend.max_model_len - tokens, 1)
        return asked.max_tokens or min(left, self._output_tokens_assumed)

    async def _counted(self, estimated_tokens: int) -> int:
        """By the backend's tokenizer; the estimate, where the request's time ends before that."""
        counter = self._target.backend.counter(self._target.model)
        left_s = self._asked.arrival.deadline_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                return (await counter.count(self._asked.content)).tokens
        return estimated_tokens

    def _admitted(self, max_tokens: int | None) -> AbstractAsyncContextManager[Any]:
        """A place at the desk, where the gateway keeps one; it waits, and tells where."""
        desk, asked = self._target.backend.desk, self._asked
        if desk is None or max_tokens is None:
            return nullcontext()
        ticket = ticket_of(
            asked.caller,
            asked.arrival,
            model=self._target.model,
            prompt_tokens=self._call.prompt_tokens,
            max_tokens=max_tokens,
            num_choices=asked.num_choices,
        )
        return desk.admitted(ticket, asked.arrival.client_id)

    def _note_place(self, place: Place) -> None:
        desk, call = self._target.backend.desk, self._call
        assert desk is not None
        call.lane, call.queued_s = desk.lane(place.ticket.id).value, place.queued_s
        header = (b"x-kvota-queue-ms", b"%d" % round(1000 * call.queued_s))
        self._exchange.headers.append(header)

    def _bridged(self) -> AbstractAsyncContextManager[None]:
        """Comments through the silences of a stream: in line, and before its first token."""
        if not self._asked.is_stream:
            return nullcontext()
        return beside(self._exchange.keep_alive(self._remark))

    def _remark(self) -> str:
        """Its place in line, then what the backend says."""
        if self._relay is not None:
            return self._relay.remark()
        desk = self._target.backend.desk
        said = None if desk is None else desk.remark(self._asked.arrival.id)
        return said or "heartbeat"

    def _ask(self, max_tokens: int | None) -> Ask:
        body, options = self._asked.body, self._asked.body.stream_options
        wants_usage = bool(options and options.include_usage)
        return Ask(
            is_stream=bool(body.stream),
            wants_usage=wants_usage,
            wants_running_usage=bool(wants_usage and options and options.continuous_usage_stats),
            num_choices=self._asked.num_choices,
            model=None if self._target.backend.is_own_kind else self._target.route.name,
            prompt_tokens=self._call.prompt_tokens,
            output_tokens_max=None if max_tokens is None else max_tokens * self._asked.num_choices,
        )

    async def _relayed(self, relay: Relay) -> None:
        if self._asked.is_stream:
            await relay.begin()
            self._begun()
            await relay.stream(self._exchange, self._keep)
            return
        body = await relay.collect()
        self._keep()
        cached = self._call.cached_tokens  # 0 also where the engine does not say
        if cached and not self._target.backend.is_own_kind:
            self._exchange.headers.append((b"x-kvota-cached-tokens", b"%d" % cached))
        await self._exchange.respond(200, body)

    def _begun(self) -> None:
        """A stream's first content is here: nobody has to wait for its end to know that."""
        self._target.backend.breaker.begun(self._target.permit, self._clock.now())

    def _keep(self) -> None:
        """All of the answer is here."""
        assert self._relay is not None
        self._learn(self._relay)
        self._call.answered(self._clock.now())

    def _learn(self, relay: Relay) -> None:
        call, tally = self._call, relay.tally
        call.prompt_tokens = tally.prompt_tokens or call.prompt_tokens
        call.cached_tokens = tally.cached_tokens
        call.output_tokens = tally.output_tokens
        call.first_token_s = tally.first_token_s
        call.last_token_s = relay.read_s


def headers_to(backend: Backend, asked: Question, call: Call) -> dict[str, str]:
    """What a backend is told beside the body; our own nodes also whose request it is."""
    headers = outgoing_headers(asked.client_headers, request_id=call.client_id, kind=backend.kind)
    if call.trace is not None:
        headers["traceparent"] = call.trace.traceparent
        if call.trace.parent_id is None:
            headers.pop("tracestate", None)  # of a trace that we could not read
    if not backend.is_own_kind:
        return headers
    band = asked.caller.band(asked.arrival.band)
    headers["x-kvota-priority"] = band.name.lower()
    for name, value in told(asked.caller.tenant, asked.caller.weight):
        headers[name.decode()] = value.decode("utf-8")
    return headers


class NotOffered(NotFound):
    """A backend does not know the path, and the client is told so: it has chosen it. What else the
    backend is asked may be as good as ever; a version that other versions are better than it is.
    """


class _Guards:
    """The content filter's guards, one for each text of an answer (`sieve.TextFilter`)."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._guards: dict[str, OutputGuard] = {}

    def feed(self, stream: str, text: str) -> str:
        guard = self._guards.get(stream)
        if guard is None:
            guard = self._guards[stream] = self._filters.guard()
        return guard.push(text)

    def finish(self, stream: str) -> str:
        guard = self._guards.pop(stream, None)
        return "" if guard is None else guard.finish()


def verdict_of(error: BaseException) -> Failure | None:
    """What an attempt's end says about it; None where it is the request's own, and final."""
    if isinstance(error, ClientClosed):
        return Failure.CLIENT_GONE
    if isinstance(error, RejectedByBackend):
        return Failure.CLIENT_ERROR
    if isinstance(error, PassedOn):
        has_retry_after = any(name == b"retry-after" for name, _ in error.headers)
        return failure_of_status(error.status, has_retry_after=has_retry_after)
    if isinstance(error, AttemptFailed):
        known = _FAILURES.get(error.kind_of_failure)
        if known is not None:
            return known
        return failure_of_status(error.backend_status or 500) or Failure.ERROR
    if isinstance(error, Refused):
        has_waited = error.reason is Refusal.QUEUE_TIMEOUT
        return Failure.BUSY if has_waited else Failure.REFUSED
    return None

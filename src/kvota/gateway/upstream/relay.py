"""From a backend's stream to the client: the whole way of one attempt's answer.

    async with upstream.open(path, outgoing_body(…), …) as reply:
        relay = Relay(reply, ask, clock, watcher=place)
        await relay.begin()              # until content has come: others may still be asked
        await relay.stream(exchange)     # or: body = await relay.collect()
    relay.tally                          # what came, also if it broke

Nothing is written to the client before the first content, so that a failure until then can become
another attempt or an HTTP error. After it a failure is raised as well, with `before_first_byte`
False; whoever owns the Exchange answers it once, with one error event and without [DONE]. The role
and whatever else came before the content is held back until then, so no client sees it twice.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import ClientClosed
from kvota.edge.cutting import CutScope
from kvota.edge.exchange import Exchange
from kvota.gateway.upstream.assembly import AssembledBody, Assembler, decode_body
from kvota.gateway.upstream.chunks import BackendUsage, decode_chunk
from kvota.gateway.upstream.connection import UpstreamReply
from kvota.gateway.upstream.failures import (
    AttemptFailed,
    FailureKind,
    RejectedByBackend,
    failure_of_event,
)
from kvota.gateway.upstream.passage import (
    Ask,
    BrokenEvent,
    ErrorEvent,
    Passage,
    Tally,
    Unwatched,
    Watcher,
)
from kvota.gateway.upstream.sieve import TextFilter
from kvota.gateway.upstream.sse_reader import EventTooLong, SseReader
from kvota.wire import sse

_HELD_BYTES_MAX: Final = 256 * 1024  # before content


def while_client_stays(exchange: Exchange) -> "_WhileClientStays":
    """Cancels what the block waits for, and raises ClientClosed, when the client goes away.

    Takes over `exchange.on_gone`; needs `exchange.watch()` to run beside it.
    """
    return _WhileClientStays(exchange)


class _WhileClientStays:
    __slots__ = ("_exchange", "_scope")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._scope = CutScope()

    async def __aenter__(self) -> None:
        self._scope.begin()
        self._exchange.on_gone = self._scope.cut
        if self._exchange.is_gone:
            self._scope.cut()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exchange.on_gone = _nobody_asks
        if self._scope.end(kind):
            message = "The client went away before its answer was complete."
            raise ClientClosed(message) from None


def _nobody_asks() -> None:
    """The block is over."""


class Relay:
    """One answer of one backend. `begin`, then `stream` or `collect`, once."""

    def __init__(
        self,
        reply: UpstreamReply,
        ask: Ask,
        clock: Clock,
        *,
        watcher: Watcher | None = None,
        text_filter: TextFilter | None = None,
    ) -> None:
        self._reply = reply
        self._ask = ask
        self._clock = clock
        self._filter = text_filter
        self._reader = SseReader(reply.settings.line_bytes_max)
        self._passage = Passage(ask, watcher=watcher or Unwatched(), text_filter=text_filter)
        self._ready: list[bytes] = []  # for the client
        self._assembler: Assembler | None = None  # for who wants one body
        self._num_held = 0
        self._is_over = False
        self.read_s: float | None = None  # when the latest of the answer came
        self.has_sent = False  # a part of a stream's content; one body goes out whole, or not
        self._kind = reply.headers.get("content-type", "nothing").lower()  # in any case: RFC 9110
        self._is_whole = self._kind.startswith("application/json")

    @property
    def tally(self) -> Tally:
        return self._passage.tally

    def remark(self) -> str:
        """What a heartbeat says while nothing else can be said: the backend's own latest, if any.

        A node tells the place in its line that way.
        """
        said = self._reader.comment.decode("utf-8", "replace")
        return said if said.startswith("queued ") else "heartbeat"

    async def begin(self) -> None:
        """Wait for the first content. Raises AttemptFailed, RejectedByBackend, RequestTimeout."""
        if self._is_whole:
            if self._ask.is_stream:
                self._said_whole(await self._reply.error_body())
                raise self._malformed("answered a request for a stream with one body")
            return
        if not self._kind.startswith("text/event-stream"):
            raise self._malformed(f"answered with {self._kind[:100]} where a stream was due")
        while not (self._passage.has_content or self._is_over):
            await self._more()
            if self._num_held > _HELD_BYTES_MAX and not self._passage.has_content:
                raise self._malformed("sent much and no content")

    async def stream(
        self, exchange: Exchange, before_end: Callable[[], None] = lambda: None
    ) -> None:
        """Pass it all on; `before_end` is called before its end is. Raises as `begin`, and
        ClientClosed.
        """
        await self.begin()
        while True:
            if self._ready:
                self.has_sent = True
                await exchange.write(self._take())
            if self._is_over:
                break
            await self._more()
        closing = self._passage.closing()
        usage = b"" if closing is None else b"data: %b\n\n" % closing
        before_end()
        await exchange.write(usage + sse.DONE, last=True)
        await self._leave_end()

    async def collect(self) -> AssembledBody:
        """The whole answer as one body. Raises as `begin`."""
        if self._is_whole:
            return await self._collect_whole()
        assembler = self._assembler = Assembler()
        await self._collect(assembler)
        try:
            body = assembler.body(self._passage.usage())
        except msgspec.MsgspecError as error:
            raise self._malformed(f"sent chunks that are no answer ({error})") from None
        await self._leave_end()
        return body

    async def _collect(self, assembler: Assembler) -> None:
        await self.begin()
        while True:
            if assembler.num_bytes > self._reply.settings.body_bytes_max:
                raise self._reply.failure(FailureKind.TOO_LARGE, "does not stop answering")
            if self._is_over:
                break
            await self._more()

    # --- reading

    async def _more(self) -> None:
        """Take in what has arrived, or wait for it."""
        data = await self._reply.read()
        passage, reader = self._passage, self._reader
        try:
            values = reader.feed(data) if data else reader.finish()
            now = self.read_s = self._clock.now()
            if self._assembler is None:
                self._let_through(values, now)
            else:
                self._put_together(self._assembler, values, now)
            passage.report()
        except EventTooLong as error:
            raise self._reply.failure(FailureKind.TOO_LARGE, f"sent too much: {error}") from None
        except BrokenEvent as error:
            raise self._malformed_event(error, is_end=not data) from None
        except ErrorEvent as error:
            raise self._said_error(error) from None
        self._reply.has_content = passage.has_content
        if passage.is_done or not data:
            self._check_end()

    def _check_end(self) -> None:
        self._is_over = True
        if self._passage.is_complete:
            return
        if self._passage.is_done:
            raise self._malformed("ended its stream without a finish_reason")
        raise self._reply.failure(FailureKind.CUT, "ended its stream in the middle")

    def _malformed(self, what: str) -> AttemptFailed:
        return self._reply.failure(FailureKind.MALFORMED, what)

    def _malformed_event(self, error: BrokenEvent, *, is_end: bool) -> AttemptFailed:
        if is_end:
            return self._reply.failure(FailureKind.CUT, "ended its stream in the middle")
        return self._malformed(f"sent an event that is no chunk ({error})")

    def _said_error(self, said: ErrorEvent) -> AttemptFailed | RejectedByBackend:
        return failure_of_event(
            msgspec.json.decode(said.error),
            backend=self._reply.settings.name,
            before_first_byte=not self._passage.has_content,
        )

    def _said_whole(self, content: bytes) -> None:
        """Raises where a body with a good status is an error: OpenRouter, and others."""
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            if (chunk := decode_chunk(content)).is_error:
                error = chunk.error if bytes(chunk.error) else msgspec.Raw(content)
                raise self._said_error(ErrorEvent(error))

    async def _leave_end(self) -> None:
        """Nobody has to wait for the few bytes behind an answer's [DONE] but its connection."""
        if self._reply.is_at_end:
            await self._reply.read()  # at once: what there may be
        self._reply.is_said = True

    def _let_through(self, values: Iterable[bytes], now: float) -> None:
        passage = self._passage
        for value in values:
            passed = passage.take(value, now)
            if passed is not None:
                self._ready.append(passed)
                self._num_held += len(passed)
            if passage.is_done:
                return

    def _put_together(self, assembler: Assembler, values: Sequence[bytes], now: float) -> None:
        passage, likeness, at = self._passage, self._passage.likeness, 0
        while at < len(values) and not passage.is_done:
            if likeness.is_known and (texts := passage.take_alike(values, at, now)):
                num_bytes = len(texts) * len(values[at])  # nearly: they differ in their texts
                assembler.add_texts(likeness.choice, likeness.field, texts, num_bytes)
                at += len(texts)
                if at == len(values):
                    break
            passed = passage.take(values[at], now)  # which is not like those
            at += 1
            if passed is not None:
                assembler.add(passed)
                self._num_held += len(passed)

    def _take(self) -> bytes:
        content = b"data: " + b"\n\ndata: ".join(self._ready) + b"\n\n"
        self._ready.clear()
        return content

    # --- an answer that could not be streamed

    async def _collect_whole(self) -> AssembledBody:
        content = await self._reply.body()
        self._said_whole(content)
        try:
            body = decode_body(content)
            usage = msgspec.convert(body.usage or {}, BackendUsage)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._malformed(f"answered with what is no completion ({error})") from None
        if not (body.choices and all(map(_is_choice, body.choices))):
            raise self._malformed("answered without a choice that says anything")
        self._reply.has_content = self._passage.has_content = True
        self.read_s = self._clock.now()
        self._passage.take_whole(usage, body.choices, self.read_s)
        if self._ask.model is not None:
            body.model = self._ask.model
        return body


def _is_choice(one: dict[str, Any]) -> bool:
    """Of an answer in one piece, for either path."""
    has_index = isinstance(one.get("index", 0), int)
    return has_index and (isinstance(one.get("message"), dict) or isinstance(one.get("text"), str))

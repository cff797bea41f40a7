"""The answer of one of our own nodes, passed on to the byte.

The node speaks the client's dialect and has checked, priced and counted; so nothing is decoded
here. Two things are taken out: the node's report of what the request took (`edge/trust.py`), and
the headers that are between the two. Errors keep their status, body and Retry-After; an error event
is raised as the status that it would have been, so that nobody takes its stream for a good one.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError, RequestError, RequestTimeout
from kvota.edge.exchange import Exchange
from kvota.edge.problems import RawHeaders
from kvota.edge.trust import USAGE, USAGE_COMMENT, UsageReport, read_usage
from kvota.gateway.calls import Call
from kvota.gateway.upstream.connection import UpstreamReply
from kvota.gateway.upstream.failures import (
    RETRY_AFTER_UNSAID_S,
    STATUS_BY_CODE,
    BackendsWords,
    FailureKind,
)

# What of a node's headers is the client's business. Its request id is the gateway's already.
_PASSED: Final = (
    "content-type",
    "retry-after",
    "x-should-retry",
    "x-kvota-queue-ms",
    "x-kvota-cached-tokens",
)
_DONE: Final = b"data: [DONE]\n\n"
_ERROR: Final = b'data: {"error":'


class PassedOn(KvotaError):
    """A node's answer with an error status, to be given to the client as it is."""

    def __init__(self, status: int, content: bytes, headers: RawHeaders) -> None:
        said = BackendsWords.read(content)
        super().__init__(said.message or f"status {status}")
        self.status = status  # type: ignore[misc]  # of the class elsewhere; here the node's
        self.code = said.code or KvotaError.code  # type: ignore[misc]
        self.kind = said.type or KvotaError.kind  # type: ignore[misc]
        self.content = content
        self.headers = headers


async def pass_on(
    reply: UpstreamReply,
    exchange: Exchange,
    call: Call,
    clock: Clock,
    on_content: Callable[[], None] = lambda: None,
) -> None:
    """Give the client what the node answers; `on_content` is called when a stream has its first.

    Raises PassedOn, AttemptFailed, RequestTimeout, ClientClosed.
    """
    if reply.status != 200:
        _count(call, read_usage(reply.headers.get(USAGE.decode(), "").encode()))
        raise PassedOn(reply.status, await reply.body(), _passed(reply))
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        await _stream(reply, exchange, call, clock, on_content)
        return
    content = await reply.body()
    call.first_token_s = call.last_token_s = clock.now()
    report = read_usage(reply.headers.get(USAGE.decode(), "").encode())
    _count(call, report or _usage_in(content))
    _measure(call, reply)
    call.answered(clock.now())
    await exchange.send_whole(200, content, _passed(reply))


def pass_figures(reply: UpstreamReply, exchange: Exchange, call: Call) -> None:
    """What the node's headers tell, where its answer is read on the way."""
    exchange.headers += [one for one in _passed(reply) if one[0].startswith(b"x-kvota-")]
    _measure(call, reply)


async def _stream(
    reply: UpstreamReply,
    exchange: Exchange,
    call: Call,
    clock: Clock,
    on_content: Callable[[], None],
) -> None:
    exchange.headers += [one for one in _passed(reply) if one[0] != b"content-type"]
    _measure(call, reply)
    tail, end = StreamEnd(), b""
    while piece := await reply.read():
        if passed := tail.feed(piece):
            if call.first_token_s is None and tail.num_events:
                call.first_token_s = clock.now()
                reply.has_content = True
                on_content()
            call.output_tokens = tail.num_events  # until the node says, and for those it never does
            passed, end = end + passed, b""
            if passed.endswith(_DONE):
                end = passed  # waits for the report behind it, which is kept first
            else:
                await exchange.write(passed)
    call.last_token_s = clock.now()
    _count(call, tail.report)
    if tail.error is not None:
        raise _said(tail.error)
    if not tail.is_whole:
        raise reply.failure(FailureKind.CUT, "ended its stream in the middle")
    call.answered(clock.now())
    await exchange.write(end, last=True)


def _said(error: Any) -> PassedOn | RequestTimeout:
    """What a node's error event means: the status that it would have been before its stream."""
    said = BackendsWords.of(error)
    if said.code == RequestTimeout.code:
        return RequestTimeout(said.message)  # by the request's own limit, as if it were kept here
    other = RequestError.status if said.type == RequestError.kind else KvotaError.status
    status = STATUS_BY_CODE.get(said.code or "", other)
    headers = [(b"retry-after", b"%d" % RETRY_AFTER_UNSAID_S)] if status == 503 else []
    return PassedOn(status, msgspec.json.encode({"error": error}), headers)


class StreamEnd:
    """Cuts a stream between events, and takes report and error off its end. Decodes no content."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = b""
        self.num_events = 0
        self.report: UsageReport | None = None
        self.error: Any = None  # what its last event says went wrong

    def feed(self, piece: bytes) -> bytes:
        """Whole events and comments that may go out now."""
        whole, border, rest = (self._rest + piece).rpartition(b"\n\n")
        if not border:
            self._rest = rest
            return b""
        self._rest, content = rest, whole + border
        at = content.rfind(USAGE_COMMENT)
        if at >= 0 and (at == 0 or content[at - 2 : at] == b"\n\n"):
            report = read_usage(content[at + len(USAGE_COMMENT) :])
            if report is not None:
                self.report, content = report, content[:at]
        if (at := content.rfind(_ERROR)) >= 0 and (error := _error_in(content[at:])) is not None:
            self.error, content = error, content[:at]
        if content:
            self.num_events += content.count(b"\ndata: ") + content.startswith(b"data: ")
            self._last = content
        return content

    @property
    def is_whole(self) -> bool:
        """It ended as a good stream has to, with [DONE]."""
        return not self._rest and self._last.endswith(_DONE)


def _error_in(content: bytes) -> Any:
    """What the event that `content` begins with says went wrong."""
    event = content.partition(b"\n\n")[0]
    try:
        said = msgspec.json.decode(event[len(b"data: ") :])
    except msgspec.DecodeError:
        return None
    return said.get("error") if isinstance(said, dict) else None


def _passed(reply: UpstreamReply) -> RawHeaders:
    return [
        (name.encode(), reply.headers[name].encode("latin-1"))
        for name in _PASSED
        if name in reply.headers
    ]


def _measure(call: Call, reply: UpstreamReply) -> None:
    queued_ms = reply.headers.get("x-kvota-queue-ms", "")
    if queued_ms.isdigit():
        call.queued_s = int(queued_ms) / 1000


def _count(call: Call, report: UsageReport | None) -> None:
    if report is not None:
        call.prompt_tokens = report.prompt_tokens
        call.cached_tokens = report.cached_tokens
        call.output_tokens = report.output_tokens
        call.course = report.course
        if call.queued_s is None and report.course is not None:
            call.queued_s = report.course.queued_s


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


def _usage_in(content: bytes) -> UsageReport | None:
    """For a node that does not trust us with a report of its own."""
    try:
        usage = msgspec.json.decode(content, type=_Body).usage
    except msgspec.MsgspecError:
        return None
    return None if usage is None else UsageReport(usage.prompt_tokens, 0, usage.completion_tokens)

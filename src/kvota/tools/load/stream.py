"""What arrives of one answer, with the moment of each token."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.tools.load.asked import Asked, Seen
from kvota.wire.sse import EventReader

DONE = b"[DONE]"
BROKEN = "broken_stream"  # it ended without saying why


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None  # vLLM, OpenRouter
    reasoning_content: str | None = None  # DeepSeek, SGLang
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Problem(msgspec.Struct):
    error: Any = None
    message: str | None = None  # where a server does not wrap it


_EVENTS: Final = msgspec.json.Decoder(_Event)
_PROBLEMS: Final = msgspec.json.Decoder(_Problem)


class StreamRecord:
    """Feed it what arrives; `seen` is the result. `due_s` is the scheduled moment on the clock."""

    def __init__(self, clock: Clock, due_s: float, *, keeps_text: bool = False) -> None:
        self._clock = clock
        self._due_s = due_s
        self._keeps_text = keeps_text
        self._reader = EventReader()
        self._status: int | None = None
        self._headers: Mapping[str, str] = {}
        self._token_s = array("d")
        self._first_content_s: float | None = None
        self._texts: list[str] = []
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._code: str | None = None
        self._message: str | None = None
        self._ended_s: float | None = None
        self._is_done = False

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The answer's head is here."""
        self._status, self._headers = status, headers

    def feed(self, received: bytes) -> None:
        """Bytes of an event stream. What follows the end of the stream is passed over."""
        now_s = self._clock.now() - self._due_s
        for value in self._reader.feed(received):
            if self._is_done:
                return
            if value == DONE:
                self._end(now_s)
            else:
                self._take_event(value, now_s)

    def finish(self) -> None:
        """The connection has said all: without a [DONE] or a reason to finish it is broken."""
        self.feed(b"\n\n")  # a last line without its end
        if not self._is_done and self._finish is None and self._code is None:
            self.fail(BROKEN, "the stream ended without a finish_reason")
        self._end(self._clock.now() - self._due_s)

    def take_body(self, body: bytes) -> None:
        """An answer that is no event stream: an error, or a server that cannot stream."""
        code, message = _problem_in(body)
        self.fail(code or f"http_{self._status}", message)

    def fail(self, code: str, message: str | None) -> None:
        """It went wrong. The first reason counts, and nothing after the stream's own end."""
        if self._code is None and not self._is_done:
            self._code, self._message = code, message
        self._end(self._clock.now() - self._due_s)

    def seen(self, asked: Asked, sent_s: float) -> Seen:
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        counted = usage.completion_tokens
        return Seen(
            scheduled_s=asked.scheduled_s,
            sent_s=sent_s,
            ended_s=self._clock.now() - self._due_s if self._ended_s is None else self._ended_s,
            first_token_s=self._token_s[0] if self._token_s else None,
            first_content_s=self._first_content_s,
            token_s=self._token_s,
            status=self._status,
            code=self._code,
            message=self._message,
            finish_reason=self._finish,
            retry_after_s=_number(self._headers.get("retry-after")),
            queued_s=_thousandth(_number(self._headers.get("x-kvota-queue-ms"))),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            output_tokens=asked.n * len(self._token_s) if counted is None else counted,
            is_estimated=counted is None,
            max_tokens=asked.max_tokens,
            n=asked.n,
            asked_prompt_tokens=asked.prompt_tokens,
            text="".join(self._texts),
            lane=asked.lane,
        )

    def _take_event(self, value: bytes, now_s: float) -> None:
        try:
            event = _EVENTS.decode(value)
        except msgspec.MsgspecError:
            self.fail(BROKEN, f"an event that is no chunk: {value[:80]!r}")
            return
        if event.error is not None:
            self.fail(*_code_and_message(event.error))
        if event.usage is not None:
            self._usage = event.usage
        is_token = False
        for choice in event.choices:
            self._finish = choice.finish_reason or self._finish
            for text, is_content in _texts_of(choice):
                is_token = is_token or choice.index == 0
                if is_content and self._first_content_s is None:
                    self._first_content_s = now_s
                if self._keeps_text:
                    self._texts.append(text)
        if is_token:
            self._token_s.append(now_s)

    def _end(self, now_s: float) -> None:
        self._is_done = True
        if self._ended_s is None:
            self._ended_s = now_s


def _texts_of(choice: _Choice) -> Iterator[tuple[str, bool]]:
    """Pieces of text, each with whether it is content; reasoning is not."""
    if choice.text:
        yield choice.text, True
    delta = choice.delta
    if delta is None:
        return
    if reasoning := delta.reasoning or delta.reasoning_content:
        yield reasoning, False
    if delta.content:
        yield delta.content, True
    if delta.tool_calls:
        yield "", True


def _problem_in(body: bytes) -> tuple[str | None, str]:
    text = body[:200].decode(errors="replace")
    try:
        problem = _PROBLEMS.decode(body)
    except msgspec.MsgspecError:
        return None, text
    if problem.error is None:
        return None, problem.message or text
    return _code_and_message(problem.error)


def _code_and_message(error: object) -> tuple[str, str]:
    """As OpenAI shapes it; of any other shape the code is "unknown"."""
    if not isinstance(error, dict):
        return "unknown", str(error)[:200]
    return str(error.get("code") or error.get("type") or "unknown"), str(error.get("message"))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None  # a date, which Retry-After may be too


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000

"""The events of one stream as they pass: what is counted, what is changed, what is held back.

    value of an event ─▶ decode (slim) ─▶ count · note endings ─▶ change if it must ─▶ to the client

Rules, for every backend:
- exactly one finish_reason per choice; what a backend says of a choice after it is dropped;
- usage is kept for the end: one chunk with it and no choices, if the client asked for it, else none
  (chunks with running usage pass unchanged only to a client that asked for just that);
- a chunk names the model as the client knows it;
- texts go through the filter, if there is one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from kvota.gateway.upstream.chunks import (
    ABSENT,
    NOTHING,
    TEXT_FIELDS,
    BackendUsage,
    Chunk,
    Part,
    decode_chunk,
    decode_usage,
    usage_chunk,
    with_model,
    without_choices,
    without_usage,
)
from kvota.gateway.upstream.likeness import Likeness
from kvota.gateway.upstream.sieve import Sieve, TextFilter, said_in

DONE: Final = b"[DONE]"
BYTES_PER_TOKEN: Final = 4  # of an answer that came whole and without usage
COUNT_MAX: Final = 2**31  # tokens; a count beyond is no count


class Watcher(Protocol):
    """Hears of every token that comes back. Must be quick."""

    def prompt_counted(self, num_tokens: int) -> None:
        """The backend has counted the prompt itself."""

    def produced(self, choice: int, num_tokens: int, *, is_done: bool) -> None:
        """A choice has `num_tokens` tokens now; with `is_done` no more will follow."""


class Unwatched:
    def prompt_counted(self, num_tokens: int) -> None:
        pass

    def produced(self, choice: int, num_tokens: int, *, is_done: bool) -> None:
        pass


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request shapes the way back."""

    is_stream: bool
    wants_usage: bool = False  # stream_options.include_usage
    wants_running_usage: bool = False  # stream_options.continuous_usage_stats
    num_choices: int = 1  # over all prompts
    model: str | None = None  # as the client knows it; None: as the backend says
    prompt_tokens: int = 0  # as counted here, for a backend that does not say
    output_tokens_max: int | None = None  # over all choices


@dataclass(slots=True)
class Tally:
    """What has come back so far. Also true when the stream broke."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0  # over all choices
    is_exact: bool = False  # the backend's own count; else ours
    first_token_s: float | None = None  # clock times
    last_token_s: float | None = None
    finish_reasons: dict[int, str] = field(default_factory=dict)


class BrokenEvent(ValueError):
    """An event that is no chunk."""


class ErrorEvent(Exception):
    """The backend says in the stream that it has failed."""

    def __init__(self, error: msgspec.Raw) -> None:
        super().__init__(bytes(error).decode("utf-8", "replace"))
        self.error = error


class Passage:
    """`take` each event in order, and `report` after those that came together.

    `tally` and `has_content` say how far the answer is.
    """

    def __init__(
        self, ask: Ask, *, watcher: Watcher, text_filter: TextFilter | None = None
    ) -> None:
        self._ask = ask
        self._watcher = watcher
        self._sieve = None if text_filter is None else Sieve(text_filter)
        self.tally = Tally(ask.prompt_tokens)
        self.has_content = False  # anything that cannot be said again: text, tools, an ending
        self.is_done = False  # the backend has said [DONE]
        self._produced = [0] * ask.num_choices  # as far as each can be told
        self._news: dict[int, bool] = {}  # choices that the watcher has not heard of; has it ended?
        self._num_seen = 0  # tokens, counted from chunks
        self._usage: bytes | None = None  # the usage object, as it came
        self._like: bytes | None = None  # a chunk of this stream
        self.likeness = Likeness()  # of chunks that are counted and changed alike
        self._hides_null = False  # their usage, which is null
        self._renamings: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def is_complete(self) -> bool:
        """Every choice that was asked for has ended."""
        return len(self.tally.finish_reasons) >= self._ask.num_choices

    def take(self, value: bytes, now: float) -> bytes | None:
        """What the client gets for it, if anything. Raises BrokenEvent, ErrorEvent, or whatever
        the filter raises.
        """
        if self.likeness.text(value) is not None:
            return self._take_alike(value, now)
        if value == DONE:
            self.is_done = True
            return None
        try:
            chunk = decode_chunk(value)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BrokenEvent(str(error)) from None
        if chunk.is_error:
            raise ErrorEvent(chunk.error if bytes(chunk.error) else msgspec.Raw(value))
        if self._like is None:
            self._begin(value, chunk)
        parts = chunk.choices or ()
        if len(parts) > 1 and len({part.index for part in parts}) < len(parts):
            raise BrokenEvent("one chunk speaks of a choice twice")
        over = self.tally.finish_reasons
        ended = {part.index for part in parts if part.index in over} if over else ()
        self._count(parts, chunk.usage, ended, now)
        may_repeat = len(parts) == 1 and not (parts[0].finish_reason or ended)
        may_learn = may_repeat and self.has_content and self._sieve is None
        if may_learn and self.likeness.learn(value):
            self._hides_null = self._hides(chunk.usage)
        return self._changed(value, chunk, ended)

    def take_alike(self, values: Sequence[bytes], at: int, now: float) -> list[str]:
        """Take all at once that say one more text of a choice and nothing else, from `at` on.

        Their texts, for who has no use for the chunks; none where `take` has to look.
        """
        likeness = self.likeness
        if likeness.choice in self.tally.finish_reasons:
            return []
        texts = likeness.texts(values, at)
        if texts:
            self._count_alike(len(texts), now)
        return texts

    def _count_alike(self, num_tokens: int, now: float) -> None:
        choice, tally = self.likeness.choice, self.tally
        self._produced[choice] += num_tokens
        tally.last_token_s = now
        self._num_seen += num_tokens
        tally.output_tokens += num_tokens
        self._news[choice] = False

    def _take_alike(self, value: bytes, now: float) -> bytes | None:
        """What `take` does with one more text of a choice, and nothing else in the chunk."""
        if self.likeness.choice in self.tally.finish_reasons:
            return None
        self._count_alike(1, now)
        return self._renamed(without_usage(value) if self._hides_null else value)

    def report(self) -> None:
        """Tell the watcher how far each choice is: once for all that arrived together."""
        for choice, is_done in self._news.items():
            self._watcher.produced(choice, self._produced[choice], is_done=is_done)
        self._news.clear()

    def usage(self) -> dict[str, object]:
        """The usage of the whole answer: the backend's, where it gave one."""
        if self._usage is not None and self.tally.is_exact:
            usage: dict[str, object] = msgspec.json.decode(self._usage)
            return usage
        tally = self.tally
        return {
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.output_tokens,
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
            "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
        }

    def closing(self) -> bytes | None:
        """The one usage chunk, if the client asked for it."""
        if not self._ask.wants_usage or self._like is None:
            return None
        return self._renamed(usage_chunk(self._like, self.usage()))

    # --- counting

    def _count(
        self, parts: Sequence[Part], usage: msgspec.Raw, ended: Collection[int], now: float
    ) -> None:
        num_new = 0
        for part in parts:
            if part.index not in ended:
                num_new += self._count_part(part)
        tally = self.tally
        if num_new:
            if tally.first_token_s is None:
                tally.first_token_s = now
            tally.last_token_s = now
            self._num_seen += num_new
            tally.output_tokens += num_new
        if usage is not NOTHING and bytes(usage) not in ABSENT:
            self._correct(usage)
        for part in parts:
            if part.index not in ended and (num_new or part.finish_reason):
                self.has_content = True
                self._news[part.index] = bool(part.finish_reason)

    def _count_part(self, part: Part) -> int:
        if not 0 <= part.index < len(self._produced):
            raise BrokenEvent(f"there is no choice {part.index}")
        num_tokens = part.num_tokens()
        self._produced[part.index] += num_tokens
        if part.finish_reason:
            self.tally.finish_reasons[part.index] = part.finish_reason
        return num_tokens

    def _correct(self, raw: msgspec.Raw) -> None:
        """The backend's own numbers replace ours, unless they cannot be true.

        A chunk with text brings at least a token, now and then a few: less than half of what was
        seen is a placeholder, more than was allowed a mistake.
        """
        usage = decode_usage(raw)
        if usage is None or usage.completion_tokens is None:
            return
        output, limit = usage.completion_tokens, self._ask.output_tokens_max
        most = COUNT_MAX if limit is None else limit
        if output < self._num_seen / 2 or not 0 <= output <= most:
            return
        tally = self.tally
        self._usage = bytes(raw)
        tally.is_exact = True
        tally.output_tokens = output
        if usage.prompt_tokens is not None and 0 < usage.prompt_tokens <= COUNT_MAX:
            tally.prompt_tokens = usage.prompt_tokens
            self._watcher.prompt_counted(usage.prompt_tokens)
        if usage.prompt_tokens_details is not None:
            cached = usage.prompt_tokens_details.cached_tokens or 0
            tally.cached_tokens = cached if 0 <= cached <= COUNT_MAX else 0
        if len(self._produced) == 1:
            self._produced[0] = max(self._produced[0], output)

    def take_whole(self, usage: BackendUsage, choices: list[dict[str, Any]], now: float) -> None:
        """An answer that came in one piece. Filters its texts in place."""
        tally = self.tally
        tally.first_token_s = tally.last_token_s = now
        self.has_content = True
        num_bytes = 0
        for choice in choices:
            index = choice.get("index", 0)
            tally.finish_reasons[index] = choice.get("finish_reason") or "stop"
            holder = said_in(choice)
            for name in TEXT_FIELDS:
                if isinstance(text := holder.get(name), str):
                    num_bytes += len(text.encode())
        if self._sieve is not None:
            self._sieve.whole(choices)
        tally.output_tokens = num_bytes // BYTES_PER_TOKEN  # unless the backend says
        self._correct(msgspec.Raw(msgspec.json.encode(usage)))
        if len(choices) == 1:
            self._watcher.produced(0, tally.output_tokens, is_done=True)

    # --- changing

    def _changed(self, value: bytes, chunk: Chunk, ended: Collection[int]) -> bytes | None:
        if not chunk.choices:
            return None  # usage is said once, at the end
        if ended:
            remaining = without_choices(value, ended)
            if remaining is None:
                return None
            value = remaining
        if self._hides(chunk.usage):
            value = without_usage(value)
        if self._sieve is not None:
            value = self._sieve.chunk(value)
        return self._renamed(value)

    def _hides(self, usage: msgspec.Raw) -> bool:
        """A null is what OpenAI sends to whoever asked for usage, and to nobody else."""
        if usage is NOTHING or self._ask.wants_running_usage:
            return False
        said = bytes(usage)
        return bool(said) and not (said == b"null" and self._ask.wants_usage)

    def _begin(self, value: bytes, chunk: Chunk) -> None:
        self._like = value
        if self._ask.model is not None and chunk.model != self._ask.model:
            old, new = (msgspec.json.encode(name) for name in (chunk.model, self._ask.model))
            # A quote inside a JSON string is always escaped, so these bytes can be nothing else.
            self._renamings = (
                (b'"model":' + old, b'"model":' + new),
                (b'"model": ' + old, b'"model": ' + new),
            )

    def _renamed(self, value: bytes) -> bytes:
        if not self._renamings:
            return value
        for old, new in self._renamings:
            if old in value:
                return value.replace(old, new, 1)
        assert self._ask.model is not None
        return with_model(value, self._ask.model)

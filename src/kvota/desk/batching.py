"""Admission where nothing is generated: texts wait for a batch, and a batch is computed at once.

    arrive ─▶ bucket by length ─▶ due: full batch, or its oldest has waited `max_wait_s` ─▶ done

An embedding holds no KV and needs one pass, so a request is priced in the tokens that its pass
computes. Texts of a batch are padded to the longest; texts of like length share a bucket, so that
at most about a third of what is computed is padding. The line is bounded in tokens, and what does
not fit is refused with the time that the line in front of it will take, by the measured speed.

`now` is seconds of the caller's clock. Dynamic batching as in Clipper (Crankshaw et al., NSDI
2017): full batch or deadline, whichever comes first.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvota.core.errors import Refusal
from kvota.desk.retry import clamp_retry_s
from kvota.desk.ticket import Refused

# Each edge at most 1.5 times the one before it: at most a third of a full row is padding.
BUCKET_EDGES = (
    8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192,
)  # fmt: skip
_SPEED_MEMORY = 0.2  # weight of the newest batch in the running speed
_UNKNOWN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    max_batch_tokens: int = 4096  # computed in one pass, padding included
    max_batch_texts: int = 64
    max_wait_s: float = 0.005  # that a text waits for company
    max_waiting_tokens: int = 65_536  # in line, padding not counted


@dataclass(frozen=True, slots=True)
class Text:
    """One text in line. `key` is the caller's; `deadline_s` is when nobody waits any more."""

    key: int
    num_tokens: int
    arrived_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TextBatch:
    texts: Sequence[Text]
    num_computed: int  # tokens, padding included

    @property
    def longest(self) -> int:
        """Tokens of the text that the others are padded to."""
        return self.num_computed // len(self.texts)


class BatchLine:
    """Texts in buckets; the longest-waiting text decides when its bucket must go."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._buckets: dict[int, deque[Text]] = {}
        self._gone: set[int] = set()  # cancelled, still in a bucket
        self.num_waiting = 0
        self.waiting_tokens = 0
        self._seconds_per_token: float | None = None

    def arrive(self, texts: Sequence[Text], now: float) -> Refused | None:
        """Put the texts of one request in line, all or none."""
        num_tokens = sum(text.num_tokens for text in texts)
        limit = self._settings.max_waiting_tokens
        # A request longer than the whole line could never come in; alone, it may.
        if self.waiting_tokens and self.waiting_tokens + num_tokens > limit:
            return Refused(Refusal.QUEUE_FULL, self.retry_after_s(), self._full(num_tokens))
        wait_s = self.wait_s()
        if wait_s is not None and now + wait_s > min(text.deadline_s for text in texts):
            message = f"The line takes {wait_s:.1f} s, longer than this request can wait."
            return Refused(Refusal.DEADLINE_UNREACHABLE, self.retry_after_s(), message)
        for text in texts:
            self._buckets.setdefault(_bucket(text.num_tokens), deque()).append(text)
        self.num_waiting += len(texts)
        self.waiting_tokens += num_tokens
        return None

    def cancel(self, text: Text) -> None:
        """Its client is gone. Call once, for a text that is in line."""
        assert text.key not in self._gone, text
        self._gone.add(text.key)
        self._leave(text)

    def due(self, now: float) -> TextBatch | None:
        """A batch that should be computed now, taken out of the line."""
        self._drop_cancelled()
        edge = self._due_edge(now)
        return None if edge is None else self._take(edge)

    def next_due_s(self) -> float | None:
        """When `due` has something at the latest; None while nobody waits."""
        self._drop_cancelled()
        heads = [bucket[0].arrived_s for bucket in self._buckets.values()]
        return min(heads) + self._settings.max_wait_s if heads else None

    def expire(self, now: float) -> list[Text]:
        """Texts whose deadline has passed in line, taken out of it."""
        late = [text for text in self._waiting() if text.deadline_s <= now]
        for text in late:
            self.cancel(text)
        return late

    def computed(self, batch: TextBatch, seconds: float) -> None:
        """Learn how fast batches are.

        A pass has a fixed cost, so one of few texts says too much for each token; and in a line
        that matters batches are full. It counts only where it was faster still.
        """
        speed = seconds / batch.num_computed
        known = self._seconds_per_token
        if 2 * len(batch.texts) < self._most(_bucket(batch.longest)):
            if known is not None:
                self._seconds_per_token = min(known, speed)
        elif known is None:
            self._seconds_per_token = speed
        else:
            self._seconds_per_token = known + _SPEED_MEMORY * (speed - known)

    def wait_s(self) -> float | None:
        """How long what is in line will take; None while nothing is known."""
        known = self._seconds_per_token
        return None if known is None else known * self.waiting_tokens

    def retry_after_s(self) -> float:
        wait_s = self.wait_s()
        return clamp_retry_s(_UNKNOWN_RETRY_S if wait_s is None else wait_s)

    def check(self) -> None:
        """The counts are those of the texts in line. Raises AssertionError."""
        waiting = list(self._waiting())
        assert len(waiting) == self.num_waiting, (len(waiting), self.num_waiting)
        assert sum(text.num_tokens for text in waiting) == self.waiting_tokens

    # --- inside

    def _due_edge(self, now: float) -> int | None:
        """The bucket whose head has waited longest, among those that must or can go."""
        settings = self._settings
        ready = [
            (bucket[0].arrived_s, edge)
            for edge, bucket in self._buckets.items()
            if bucket[0].arrived_s + settings.max_wait_s <= now or len(bucket) >= self._most(edge)
        ]
        return min(ready)[1] if ready else None

    def _most(self, edge: int) -> int:
        settings = self._settings
        return max(1, min(settings.max_batch_texts, settings.max_batch_tokens // edge))

    def _take(self, edge: int) -> TextBatch:
        bucket = self._buckets[edge]
        taken: list[Text] = []
        while bucket and len(taken) < self._most(edge):
            text = bucket.popleft()
            if text.key in self._gone:
                self._gone.discard(text.key)
                continue
            taken.append(text)
            self._leave(text)
        if not bucket:
            del self._buckets[edge]
        longest = max(text.num_tokens for text in taken)
        return TextBatch(taken, longest * len(taken))

    def _drop_cancelled(self) -> None:
        """So that every bucket has a head that somebody waits for."""
        for edge in list(self._buckets):
            bucket = self._buckets[edge]
            while bucket and bucket[0].key in self._gone:
                self._gone.discard(bucket.popleft().key)
            if not bucket:
                del self._buckets[edge]

    def _leave(self, text: Text) -> None:
        self.num_waiting -= 1
        self.waiting_tokens -= text.num_tokens

    def _waiting(self) -> Iterator[Text]:
        for bucket in self._buckets.values():
            yield from (text for text in bucket if text.key not in self._gone)

    def _full(self, num_tokens: int) -> str:
        return (
            f"{self.waiting_tokens} tokens are in line and this request has {num_tokens}; the "
            f"limit is {self._settings.max_waiting_tokens}."
        )


def _bucket(num_tokens: int) -> int:
    """The edge that a text is padded to at most."""
    at = bisect_left(BUCKET_EDGES, num_tokens)
    return BUCKET_EDGES[at] if at < len(BUCKET_EDGES) else num_tokens

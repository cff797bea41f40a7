"""One request that is to be sent, and what its client saw of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvota.core.errors import Limit, Refusal
from kvota.core.request import Band

UNFINISHED: Final = "unfinished"  # the run was over before the answer was
CONNECTION: Final = "connection"  # there was none, or it broke
# A refusal in a stream that a comment has opened has the status 200.
REFUSALS: Final = frozenset([*Refusal, *Limit])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`prompt` is text, or token ids (only for /v1/completions). Lengths are tokens."""

    scheduled_s: float = 0.0  # from the start of the run
    prompt: str | Sequence[int]
    max_tokens: int  # forced to be reached, where the server can be told to
    prompt_tokens: int | None = None  # what `prompt` should count as; None: not known
    lane: str = ""  # a name to group results by
    n: int = 1  # choices, of `max_tokens` each
    band: Band = Band.INTERACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one client saw. All times but `scheduled_s` count from the scheduled moment.

    So a request that was sent late, or waited for a place at the generator, is charged for it:
    a slow server cannot look fast by slowing down whoever measures it. Of several choices, tokens
    are timed for the first one and counted for all.
    """

    scheduled_s: float
    sent_s: float  # the generator's own lag
    ended_s: float
    first_token_s: float | None = None  # the first piece of text or of reasoning
    first_content_s: float | None = None  # the first that is not reasoning
    token_s: Sequence[float] = field(default=())  # of each event with text
    status: int | None = None  # None: no answer began
    code: str | None = None  # of the error, as status or as an event; None: whole
    message: str | None = None
    finish_reason: str | None = None
    retry_after_s: float | None = None
    queued_s: float | None = None  # as the server says in x-kvota-queue-ms
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    is_estimated: bool = False  # the output's length: the server did not tell it
    max_tokens: int = 0  # of a choice, as asked
    n: int = 1  # as asked
    asked_prompt_tokens: int | None = None  # what the prompt should have counted as
    text: str = ""  # kept only where the sender was asked to
    lane: str = ""

    @property
    def is_whole(self) -> bool:
        """It came to its proper end."""
        return self.code is None

    @property
    def is_refused(self) -> bool:
        """The server said that it is, or this client has come, at its limit."""
        return not self.is_whole and (self.status in (429, 503) or self.code in REFUSALS)

    @property
    def is_unfinished(self) -> bool:
        return self.code == UNFINISHED

    @property
    def service_s(self) -> float:
        """From when it was really sent to its end."""
        return self.ended_s - self.sent_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of the tokens after the first (TPOT); None when there is only one."""
        num_tokens = self.output_tokens / self.n
        if num_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (num_tokens - 1)

    @property
    def is_off_length(self) -> bool:
        return self.output_tokens != self.n * self.max_tokens

    @property
    def gaps_s(self) -> list[float]:
        """Times between events with text."""
        return [later - at for at, later in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def stall_s(self) -> float | None:
        """Mean of the longest tenth of the gaps (at least one): what a stall feels like.

        Mooncake (FAST'25) judges time between tokens so: it shows what a mean hides.
        """
        gaps = sorted(self.gaps_s, reverse=True)
        if not gaps:
            return None
        longest = gaps[: -(-len(gaps) // 10)]
        return sum(longest) / len(longest)

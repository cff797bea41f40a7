"""What a client asked, once it is understood: token ids in, limits, and how to choose tokens.

A Request is built at the edge, checked there, and never changes afterwards. Everything that runs
lives in the engine's own state (`scheduler/sequence.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvota.core.errors import KvotaError, Outcome


class Band(IntEnum):
    """How urgent a request is. Smaller is served first."""

    INTERACTIVE = 0
    BATCH = 1


class FinishReason(StrEnum):
    """Why a choice has no more tokens, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Constraint(Protocol):
    """A grammar that one sequence must follow. Stateful; owned by that sequence alone."""

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the allowed next tokens as bits (token t is bit t % 32 of word t // 32)."""

    def accept(self, token: int) -> None:
        """Advance by a token that was sampled under the mask.

        Raises ValueError when the grammar cannot take it; the request then ends alone.
        """

    def is_complete(self) -> bool:
        """True when the text so far is a whole sentence of the grammar and nothing may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    The order is: logit bias, penalties, min_tokens, grammar mask, temperature, top_k, top_p,
    min_p, draw. `temperature == 0` takes the most likely token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # always set at the edge: drawn there when the client gave none
    min_tokens: int = 0
    # Tokens that end a choice: the model's own (unless ignore_eos) and the client's. Suppressed
    # while fewer than min_tokens are produced.
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # None: none wanted; k: the chosen token's and the top k


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: a prompt in token ids, `n` choices wanted, limits and deadlines.

    Times are seconds of the clock that the engine was given.
    """

    id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    arrived_s: float
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    # Part of every block hash: requests share prefix blocks only within one salt.
    cache_salt: str = ""
    use_prefix_cache: bool = True
    band: Band = Band.INTERACTIVE
    queue_deadline_s: float | None = None  # must have its first chunk by then
    deadline_s: float | None = None  # must have ended by then
    new_constraint: Callable[[], Constraint] | None = None  # one fresh grammar state per choice
    labels: Mapping[str, Any] = field(default_factory=dict)  # for logs only; never interpreted


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the unmodified logits.

    `top` holds (token, logprob) pairs, most likely first, and not necessarily the chosen token.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # of `token` in the vocabulary, 1 is most likely; of prompt tokens only


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The whole prompt is in KV. Published once, before the first Delta of a request."""

    cached_tokens: int  # of the prompt, taken from the prefix cache
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of prompt[1:], when asked for
    queued_s: float = 0.0  # arrival to the first chunk


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice.

    `text` may lag behind `token_ids`: half characters and possible stop strings are held back.
    Exactly one Delta of a choice has `finish`; nothing of that choice follows it.
    """

    choice: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """The request's KV blocks are back. Its tokens stay, and it goes on when it is resumed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request, always published, exactly once. Its KV blocks are back."""

    outcome: Outcome
    error: KvotaError | None  # None exactly when outcome is COMPLETED
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int  # over all choices
    num_preemptions: int
    queued_s: float  # arrival to the first chunk; to the end if it never had one
    first_token_s: float | None  # arrival to the first sampled token
    total_s: float  # arrival to the end
    kv_block_s: float = 0.0  # KV blocks held, each for so many seconds


Event = PromptRead | Delta | Ended  # what a client may hear of
EngineEvent = Event | Paused

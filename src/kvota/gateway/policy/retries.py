"""Whether a failed attempt may be tried again somewhere else, and what it says about the backend.

    failure              again?  backend   when
    UNREACHABLE          yes     failed    no connection: nothing was sent
    LOST                 yes     failed    connection lost before the first byte of the answer
    SILENT               yes     failed    no first byte within the time allowed
    GARBLED              yes     failed    an answer that is not what the API promises
    ERROR                yes     failed    5xx, or an error event before any content
    BUSY                 yes     held      429, or 503 with Retry-After: leave it alone until then
    REFUSED              free    nothing   the desk that the gateway keeps for it said no to this
                                           request: nothing was sent, so there is nothing to retry
    MISCONFIGURED        yes     shut      401, 402, 403, 407 from the backend: the operator's
                                           mistake, never shown to the client
    NOT_OFFERED          yes     shut      404, 405: no such model or path there
    CLIENT_ERROR         no      nothing   another 4xx: wrong everywhere, passed on unchanged
    CLIENT_GONE          no      nothing   nobody is waiting for the answer
    CUT                  no      failed    failed after content went out to the client

Asking a model has no side effect on the backend, so an attempt whose answer nobody has seen may be
repeated. Once a byte of content went out it may not: the client would get the beginning twice.
`CUT` is what every failure becomes then, and no caller can get around it.

Retries are for failures that are somebody's bad luck, not for an overload, which they make worse.
So there is a budget over all requests (Google SRE book, ch. 21: 10 % and at most 3 attempts):

    tokens ← min(tokens + ratio, burst)  for each request       a retry takes 1
           ← + floor_per_s · seconds                            so that a quiet service may retry

    retries in any time ≤ burst + ratio · requests + floor_per_s · seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.chance import Chance


class Failure(StrEnum):
    """How an attempt failed. The value is the metric label."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    SILENT = "silent"
    GARBLED = "garbled"
    ERROR = "error"
    BUSY = "busy"
    REFUSED = "refused"
    MISCONFIGURED = "misconfigured"
    NOT_OFFERED = "not_offered"
    CLIENT_ERROR = "client_error"
    CLIENT_GONE = "client_gone"
    CUT = "cut"


class Blame(StrEnum):
    """What the failure means for the backend."""

    FAILED = "failed"  # Breaker.report(permit, False), and a failed call for outliers and rollout
    HELD = "held"  # Breaker.withdraw(permit), then Breaker.hold(until)
    SHUT = "shut"  # the same with `is_fault`, and a failed call for outliers and rollout
    NOTHING = "nothing"  # Breaker.withdraw(permit)


@dataclass(frozen=True, slots=True)
class Rule:
    may_retry: bool
    blame: Blame
    is_paid: bool = True  # from the budget of retries


_YES_FAILED: Final = Rule(True, Blame.FAILED)
RULES: Final[Mapping[Failure, Rule]] = MappingProxyType(
    {
        Failure.UNREACHABLE: _YES_FAILED,
        Failure.LOST: _YES_FAILED,
        Failure.SILENT: _YES_FAILED,
        Failure.GARBLED: _YES_FAILED,
        Failure.ERROR: _YES_FAILED,
        Failure.BUSY: Rule(True, Blame.HELD),
        Failure.REFUSED: Rule(True, Blame.NOTHING, is_paid=False),
        Failure.MISCONFIGURED: Rule(True, Blame.SHUT),
        Failure.NOT_OFFERED: Rule(True, Blame.SHUT),
        Failure.CLIENT_ERROR: Rule(False, Blame.NOTHING),
        Failure.CLIENT_GONE: Rule(False, Blame.NOTHING),
        Failure.CUT: Rule(False, Blame.FAILED),
    }
)
_FAILED: Final = frozenset({408, 424})  # 424: what TGI says of a generation that failed
_MISCONFIGURED: Final = frozenset({401, 402, 403, 407})
_NOT_OFFERED: Final = frozenset({404, 405})


def failure_of_status(status: int, *, has_retry_after: bool = False) -> Failure | None:
    """What an HTTP status of a backend means; None for 1xx to 3xx, which are no failure."""
    if status < 400:
        return None
    if status == 429 or (status == 503 and has_retry_after):
        return Failure.BUSY
    if status >= 500 or status in _FAILED:
        return Failure.ERROR
    if status in _NOT_OFFERED:
        return Failure.NOT_OFFERED
    return Failure.MISCONFIGURED if status in _MISCONFIGURED else Failure.CLIENT_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    attempts_max: int = 3  # of one request, over all backends and fallback models together
    budget_ratio: float = 0.1  # retries per request
    budget_floor_per_s: float = 0.1
    budget_burst: float = 10.0
    backoff_s: float = 0.1  # before the second attempt on the same backend; then doubled
    backoff_max_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise ConfigError(f"retries: attempts_max must be at least 1, got {self.attempts_max}.")
        if not 0 <= self.budget_ratio <= 1:
            raise ConfigError(f"retries: budget_ratio must be in [0, 1], got {self.budget_ratio}.")
        if not (self.budget_floor_per_s >= 0 and self.budget_burst >= 1):
            raise ConfigError(
                "retries: budget_floor_per_s must be at least 0 and budget_burst at least 1, got "
                f"{self.budget_floor_per_s} and {self.budget_burst}."
            )
        if not 0 <= self.backoff_s <= self.backoff_max_s:
            raise ConfigError(
                "retries: 0 ≤ backoff_s ≤ backoff_max_s must hold, got "
                f"{self.backoff_s} and {self.backoff_max_s}."
            )


class RetryBudget:
    """The token bucket of all requests together. Starts full. O(1). `settings` may change."""

    def __init__(self, settings: RetrySettings) -> None:
        self.settings = settings
        self._tokens = settings.budget_burst
        self._filled_s: float | None = None

    def note_request(self, now: float) -> None:
        """A request (not a retry of one) begins."""
        self._fill(self.settings.budget_ratio, now)

    def try_take(self, now: float) -> bool:
        """True: one retry may be made, and is paid for."""
        self._fill(0.0, now)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def tokens(self, now: float) -> float:
        """Retries left, for metrics."""
        self._fill(0.0, now)
        return self._tokens

    def _fill(self, tokens: float, now: float) -> None:
        if self._filled_s is not None and now > self._filled_s:
            tokens += (now - self._filled_s) * self.settings.budget_floor_per_s
        self._filled_s = now
        self._tokens = min(self._tokens + tokens, self.settings.budget_burst)


class Stop(StrEnum):
    """Why there is no further attempt. The value is the metric label."""

    RULE = "rule"  # this failure is not repeated
    BYTES_SENT = "bytes_sent"
    ATTEMPTS = "attempts"
    DEADLINE = "deadline"
    BUDGET = "budget"


@dataclass(slots=True)
class Attempts:
    """The attempts of one request, over backends and fallback models.

    Tell it every attempt (`begin`) and every failure (`after`). Without a call of `after` that
    returned None there is no second attempt: `begin` asserts it.
    """

    settings: RetrySettings
    budget: RetryBudget
    deadline_s: float | None = None
    tried: list[str] = field(default_factory=list)  # backend ids in order, for the error's text
    _may_begin: bool = True

    @property
    def num_left(self) -> int:
        return self.settings.attempts_max - len(self.tried)

    def begin(self, backend: str) -> None:
        assert self._may_begin, f"an attempt on {backend} that no rule allows"
        assert self.num_left > 0
        self._may_begin = False
        self.tried.append(backend)

    def after(self, failure: Failure, *, content_sent: bool, now: float) -> Stop | None:
        """None: one more attempt may begin, and is paid for if it must be. Otherwise why not.

        `content_sent`: a byte of the answer's content went out to the client (comments and
        headers that bridge a wait are no content).
        """
        assert self.tried, "no attempt has begun"
        if content_sent:
            return Stop.BYTES_SENT
        rule = RULES[failure]
        if not rule.may_retry:
            return Stop.RULE
        if self.num_left <= 0:
            return Stop.ATTEMPTS
        if self.deadline_s is not None and now >= self.deadline_s:
            return Stop.DEADLINE
        if rule.is_paid and not self.budget.try_take(now):
            return Stop.BUDGET
        self._may_begin = True
        return None


def blame(failure: Failure, *, content_sent: bool) -> Blame:
    """What to tell the breaker. A failure after content went out is a `CUT`."""
    if content_sent and RULES[failure].may_retry:
        return RULES[Failure.CUT].blame
    return RULES[failure].blame


def retry_delay_s(
    settings: RetrySettings, num_tried: int, retry_after_s: float | None, chance: Chance
) -> float:
    """Seconds to wait before asking the same backend again; another one may be asked at once.

    Full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS 2015). Never before the time that
    the backend asked for, and spread over a fifth of it behind it.
    """
    doubled_s = settings.backoff_s * 2.0 ** min(num_tried - 1, 30)
    delay_s = min(doubled_s, settings.backoff_max_s) * chance.random()
    if retry_after_s is None:
        return delay_s
    return max(retry_after_s, 0.0) * (1 + 0.2 * chance.random()) + delay_s

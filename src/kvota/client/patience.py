"""When to try again, how long to wait, and when to ask another model: decisions without I/O.

answer ─▶ final ─────────────────────────────────▶ give it to the caller
     └──▶ worth a retry ─ tries and budget left ─▶ wait, and send again
                      └─ else: a fallback model? ─▶ send once to that one

The server's word counts first: `x-should-retry`, then `Retry-After`, which is kept to exactly (the
server has spread it already). Without it waits grow twofold with full jitter (Brooker, "Exponential
Backoff and Jitter", 2015). The retry budget is that of Finagle: each request earns a tenth of a
retry, so that a server in trouble never gets more than 1.1 times its load, plus a small reserve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from random import Random
from threading import Lock
from typing import Final

RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FELL_BACK: Final = frozenset({429, 500, 502, 503, 504})  # another model may do better there


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client waits for what. Times are seconds."""

    connect_s: float = 5.0
    silence_s: float = 60.0  # of a stream; kvota's heartbeats come every 10
    first_token_s: float = 60.0  # in line and reading the prompt, for answers in one piece
    per_token_s: float = 0.5  # slower than this counts as hanging
    default_max_tokens: int = 1024  # where the request does not say
    num_retries: int = 4  # of one request
    wait_first_s: float = 0.5
    wait_max_s: float = 30.0
    retry_after_max_s: float = 120.0  # told to come back later than this: give up
    budget_share: float = 0.1  # retries earned by each request
    budget_reserve: float = 10.0  # retries that a new client has, and the most that it saves

    @property
    def unsaid_s(self) -> float:
        """The timeout of a client whose caller said none: next to `silence_s`, as nobody writes it.

        So a caller's own is known by its number, and kept.
        """
        return math.nextafter(self.silence_s, math.inf)

    def read_s(self, *, is_stream: bool, max_tokens: int | None) -> float:
        """How long the socket may be silent. An answer in one piece is silent until it is whole."""
        if is_stream:
            return self.silence_s
        return self.first_token_s + self.per_token_s * (max_tokens or self.default_max_tokens)


class RetryBudget:
    """Retries that may still be spent, by all threads that share a client."""

    def __init__(self, patience: Patience) -> None:
        self._share = patience.budget_share
        self._most = self._left = patience.budget_reserve
        self._lock = Lock()

    def earn(self) -> None:
        """A request was sent for the first time."""
        with self._lock:
            self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Whether there was a retry left; it is gone now."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True


@dataclass(frozen=True, slots=True)
class Ending:
    """How one try ended. `status` None: the connection failed before an answer came."""

    status: int | None
    headers: Mapping[str, str]  # names in lower case


def is_worth_a_retry(ending: Ending) -> bool:
    """The server says so, or the status does. A dead connection is, before any answer."""
    told = ending.headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    return ending.status is None or ending.status in RETRIED


def wait_s(
    ending: Ending, number: int, patience: Patience, chance: Random, now_unix: float
) -> float | None:
    """Seconds to wait before retry `number`, from 1; None when it is too long to wait for."""
    told_s = retry_after_s(ending.headers, now_unix)
    if told_s is not None:
        return told_s if told_s <= patience.retry_after_max_s else None
    most_s = min(patience.wait_max_s, patience.wait_first_s * 2 ** (number - 1))
    return chance.uniform(0.0, most_s)


def retry_after_s(headers: Mapping[str, str], now_unix: float) -> float | None:
    """What Retry-After says, in either of its forms; None when it says nothing that counts."""
    told = headers.get("retry-after", "").strip()
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(told).timestamp() - now_unix
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds and seconds < 1e9 else None

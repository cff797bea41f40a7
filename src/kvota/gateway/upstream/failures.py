"""How an attempt at a backend goes wrong, and what each way means for whoever tries another.

    BackendFailed
    └── AttemptFailed          the backend's fault: another one may be asked, as long as no content
                               has come (`before_first_byte`)
    RequestError
    └── RejectedByBackend      the client's fault, says the backend: nobody else is asked, the
                               client hears it as the backend said it

A backend that cannot reach its limit honestly answers 429 or 503 with Retry-After. To another
backend that is a reason to try; to the client it becomes, at the end, a refusal of ours.
"""

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvota.core.errors import (
    BackendFailed,
    KvotaError,
    Refusal,
    Refused,
    RequestCancelled,
    RequestError,
    RequestTimeout,
)

RETRY_AFTER_MAX_S: Final = 3600.0
RETRY_AFTER_UNSAID_S: Final = 5.0  # a backend that is full and does not say for how long
_MESSAGE_LENGTH_MAX: Final = 2000
# The backend does not want this request, whoever sends it. Every other 4xx is between it and us:
# our key or credit there (401, 402, 403), its model name or our path (404, 405), or its load
# (408, 409, 425, 429).
_CLIENTS_FAULT: Final = frozenset({400, 410, 413, 414, 415, 422, 431, 451})
_FULL: Final = frozenset({429, 503, 529})
_KEY_LIKE = re.compile(r"\b(sk|key|hf|Bearer)[-_ ][A-Za-z0-9_\-]{8,}")


class FailureKind(StrEnum):
    """What happened. The value is a metric label."""

    CONNECT = "connect"  # nobody there
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"  # no status, or no content, for too long
    IDLE_TIMEOUT = "idle_timeout"  # began, then went silent
    CUT = "cut"  # the connection ended before the answer
    MALFORMED = "malformed"  # not HTTP, not SSE, not JSON, or not an answer
    TOO_LARGE = "too_large"  # over our bounds
    FULL = "full"  # 429 and 503: it has no room now
    CREDENTIALS = "credentials"  # 401 and 403: the operator's mistake
    STATUS = "status"  # any other error status
    ERROR_EVENT = "error_event"  # it said in the stream that it failed


class AttemptFailed(BackendFailed):
    """One backend has failed one request. `status` is the backend's, where it got that far."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        backend: str,
        before_first_byte: bool,
        status: int | None = None,
        backend_code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind_of_failure = kind
        self.backend = backend
        self.before_first_byte = before_first_byte
        self.backend_status = status
        self.backend_code = backend_code
        self.retry_after_s = retry_after_s

    def for_client(self) -> KvotaError:
        """What the client is told when nobody else can be asked.

        A backend that is full is our refusal with its Retry-After; a node's own refusals and time
        limits keep their codes. Everything else is 502.
        """
        if self.backend_status == 504 and self.backend_code == RequestTimeout.code:
            return RequestTimeout(self.message)
        if self.kind_of_failure is not FailureKind.FULL:
            return self
        known = {reason.value: reason for reason in Refusal}
        reason = known.get(self.backend_code or "", Refusal.QUEUE_FULL)
        wait_s = RETRY_AFTER_UNSAID_S if self.retry_after_s is None else self.retry_after_s
        return Refused(reason, self.message, retry_after_s=wait_s)


class RejectedByBackend(RequestError):
    """The backend says that the request itself is wrong. Status, code and type are its own."""

    def __init__(
        self, message: str, *, status: int, code: str | None, kind: str | None, param: str | None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status  # type: ignore[misc]  # of the class elsewhere; here the backend's
        self.code = code or RequestError.code  # type: ignore[misc]
        self.kind = kind or RequestError.kind  # type: ignore[misc]


def failure_of(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    backend: str,
    before_first_byte: bool = True,
) -> AttemptFailed | RejectedByBackend:
    """What an answer with an error status means. Understands the bodies of all known servers."""
    said = BackendsWords.read(body)
    if status in _CLIENTS_FAULT:
        return RejectedByBackend(
            said.message or f"The backend refused the request with status {status}.",
            status=status,
            code=said.code,
            kind=said.type,
            param=said.param,
        )
    return AttemptFailed(
        _kind_of(status),
        f"The backend {backend} answered with status {status}{_quoted(said.message, status)}.",
        backend=backend,
        before_first_byte=before_first_byte,
        status=status,
        backend_code=said.code,
        retry_after_s=retry_after_s(headers.get("retry-after")),
    )


def failure_of_event(
    error: Any, *, backend: str, before_first_byte: bool
) -> AttemptFailed | RejectedByBackend:
    """What `{"error": …}` in a stream means: as if it had been a status, where it names one."""
    said = BackendsWords.of(error)
    status = said.status or STATUS_BY_CODE.get(said.code or "")
    if before_first_byte and status in _CLIENTS_FAULT:
        return failure_of(status, {}, msgspec.json.encode({"error": error}), backend=backend)
    full = status in _FULL
    return AttemptFailed(
        FailureKind.FULL if full else FailureKind.ERROR_EVENT,
        f"The backend {backend} failed{_quoted(said.message, status)}.",
        backend=backend,
        before_first_byte=before_first_byte,
        status=status,
        backend_code=said.code,
    )


def retry_after_s(header: str | None, *, unix_s: float | None = None) -> float | None:
    """Seconds, from either form of Retry-After; None when it is absent or makes no sense."""
    if header is None:
        return None
    text = header.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            due_s = parsedate_to_datetime(text).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None
        seconds = due_s - (time.time() if unix_s is None else unix_s)
    if seconds != seconds:  # NaN
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)


class BackendsWords(msgspec.Struct, frozen=True):
    """What a backend said went wrong, in whatever form it says such things."""

    message: str = ""
    code: str | None = None
    type: str | None = None
    param: str | None = None
    status: int | None = None  # where the body repeats it

    @staticmethod
    def read(body: bytes) -> "BackendsWords":
        """Never raises: a body that is not JSON is itself the message."""
        try:
            said = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return BackendsWords(_cleaned(body.decode("utf-8", "replace")))
        return BackendsWords.of(said.get("error", said) if isinstance(said, dict) else said)

    @staticmethod
    def of(said: Any) -> "BackendsWords":
        """OpenAI: {message, type, param, code}. vLLM and llama.cpp: code is the status.
        TGI: {"error": text}. FastAPI: {"detail": text or list}.
        """
        if not isinstance(said, dict):
            return BackendsWords(_cleaned(_text(said) or ""))
        code = said.get("code")
        status = code if isinstance(code, int) and not isinstance(code, bool) else None
        return BackendsWords(
            _cleaned(_text(said.get("message") or said.get("detail")) or ""),
            _text(code) if status is None else None,
            _text(said.get("type")),
            _text(said.get("param")),
            status,
        )


# What our own nodes say in a stream that a heartbeat has opened.
STATUS_BY_CODE: Final[Mapping[str, int]] = {
    RequestTimeout.code: RequestTimeout.status,
    RequestCancelled.code: RequestCancelled.status,  # which nobody else may begin anew
    **{reason.value: Refused.status for reason in Refusal},
}


def _kind_of(status: int) -> FailureKind:
    if status in _FULL:
        return FailureKind.FULL
    return FailureKind.CREDENTIALS if status in (401, 403) else FailureKind.STATUS


def _quoted(message: str, status: int | None) -> str:
    """Its own words, unless they may hold something about our credentials."""
    return f": {message.rstrip('.')}" if message and status not in (401, 403) else ""


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _cleaned(message: str) -> str:
    return _KEY_LIKE.sub(r"\1-…", message)[:_MESSAGE_LENGTH_MAX].strip()

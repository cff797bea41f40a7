"""Every way a request or a start-up can go wrong, as one tree.

    KvotaError
    ├── RequestError               the client can fix it; a retry of the same request cannot help
    │   ├── InvalidRequest           400 invalid_request
    │   ├── ContextLengthExceeded    400 context_length_exceeded
    │   ├── OutputTooLong            400 output_too_long
    │   ├── Unauthorized             401 missing_api_key · invalid_api_key · expired_api_key
    │   ├── Forbidden                403 model_not_allowed · not_allowed
    │   ├── ContentFiltered          400 content_filtered
    │   ├── NotFound                 404 not_found
    │   │   └── ModelNotFound        404 model_not_found
    │   ├── MethodNotAllowed         405 method_not_allowed
    │   ├── BodyTooLarge             413 body_too_large
    │   └── UnsupportedMediaType     415 unsupported_media_type
    ├── RateLimited                this key's own limit; a retry helps after `retry_after_s`
    │                                429 rate_limit_requests · rate_limit_tokens ·
    │                                    rate_limit_concurrency · abuse_blocked
    ├── Refused                    the service is at its limit; a retry helps after `retry_after_s`
    │                                503 queue_full · kv_budget_exhausted · deadline_unreachable ·
    │                                    queue_timeout · draining · engine_restarting
    ├── RequestFailed              the request was accepted and could not be finished
    │   ├── RequestTimeout           504 request_timeout
    │   ├── BackendFailed            502 backend_error
    │   ├── RequestCancelled         410 request_cancelled (by DELETE; its client is still there)
    │   └── ClientClosed             499 client_closed (only in logs and metrics)
    └── StartupError               the operator can fix it; nothing listens yet
        ├── ConfigError              a setting
        ├── ModelError               the model's files
        │   └── UnsupportedModel       the files are fine, kvota cannot run this kind
        └── InsufficientMemory       the memory bill does not add up

The class says the HTTP status, the code, whose fault it is and whether a retry helps. The mapping
to HTTP happens once, at the edge. `assert` is for our own bugs and ends the process.
"""

from enum import StrEnum
from typing import ClassVar


class KvotaError(Exception):
    """Root of the tree. `message` is one or two plain sentences for whoever can fix it."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"  # OpenAI calls this field `type`
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(KvotaError):
    """The request itself is wrong. `param` names the field, in the client's spelling."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, out of range, or contradicts another."""


class ContextLengthExceeded(RequestError):
    """Prompt plus output do not fit the model's context. The message gives the true numbers."""

    code = "context_length_exceeded"


class OutputTooLong(RequestError):
    """The asked-for output alone is over the server's limit."""

    code = "output_too_long"


class KeyProblem(StrEnum):
    """What is wrong with a request's API key. The value is the error code."""

    MISSING = "missing_api_key"
    INVALID = "invalid_api_key"
    EXPIRED = "expired_api_key"


class Unauthorized(RequestError):
    status = 401
    kind = "authentication_error"

    def __init__(self, problem: KeyProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class Forbidden(RequestError):
    """The key is good and may not do this."""

    status = 403
    code = "not_allowed"
    kind = "permission_error"


class ModelNotAllowed(Forbidden):
    code = "model_not_allowed"


class ContentFiltered(RequestError):
    """The text holds something that this server's operator does not let through."""

    code = "content_filtered"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class Limit(StrEnum):
    """Which of a key's limits is reached. The value is the error code and the metric label."""

    REQUESTS = "rate_limit_requests"
    TOKENS = "rate_limit_tokens"
    CONCURRENCY = "rate_limit_concurrency"
    ABUSE = "abuse_blocked"


class RateLimited(KvotaError):
    """The caller's own limit is reached, not the service's. `retry_after_s`: its window frees."""

    status = 429
    kind = "rate_limit_error"
    retryable = True

    def __init__(self, limit: Limit, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Refusal(StrEnum):
    """Why the service says no. The value is the error code and the metric label."""

    QUEUE_FULL = "queue_full"
    KV_BUDGET_EXHAUSTED = "kv_budget_exhausted"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    QUEUE_TIMEOUT = "queue_timeout"
    DRAINING = "draining"
    ENGINE_RESTARTING = "engine_restarting"


class Refused(KvotaError):
    """The service is at its limit. Nothing was computed; come back after `retry_after_s`."""

    status = 503
    kind = "overloaded_error"
    retryable = True

    def __init__(self, reason: Refusal, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class RequestFailed(KvotaError):
    """The request was accepted and ended without its answer."""


class RequestTimeout(RequestFailed):
    status = 504
    code = "request_timeout"
    kind = "timeout_error"


class BackendFailed(RequestFailed):
    status = 502
    code = "backend_error"
    retryable = True


class RequestCancelled(RequestFailed):
    """Whoever may cancel it did. 410 because clients in the field retry 409 but never this."""

    status = 410
    code = "request_cancelled"
    kind = "cancelled_error"


class ClientClosed(RequestFailed):
    status = 499
    code = "client_closed"


class StartupError(KvotaError):
    """The process cannot start. Shown to the operator as one message, never as a traceback."""


class ConfigError(StartupError):
    pass


class ModelError(StartupError):
    pass


class UnsupportedModel(ModelError):
    pass


class InsufficientMemory(StartupError):
    pass


class Outcome(StrEnum):
    """How a request ended: exactly one per request, and the label of `kvota_requests_total`."""

    COMPLETED = "completed"
    INVALID = "invalid"
    REFUSED = "refused"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    CLIENT_CLOSED = "client_closed"
    SLOW_READER = "slow_reader"  # took nothing of its answer for too long
    DENIED = "denied"  # no key, a wrong one, or one that may not
    RATE_LIMITED = "rate_limited"  # the caller's own limit
    ENGINE_ERROR = "engine_error"
    SHUTDOWN = "shutdown"

"""What a request is told whose time is over. `limit_s` is what it was given from its arrival."""

from kvota.core.errors import Refusal, Refused, RequestTimeout


def not_begun(limit_s: float, *, retry_after_s: float) -> Refused:
    """It stood in line until its wait was over; nothing was computed."""
    return Refused(
        Refusal.QUEUE_TIMEOUT,
        f"The request did not begin within {limit_s:.3g} s, the longest wait that is allowed.",
        retry_after_s=retry_after_s,
    )


def no_first_token(limit_s: float) -> RequestTimeout:
    return RequestTimeout(f"The first token was not there within {limit_s:.3g} s, its time limit.")


def not_complete(limit_s: float) -> RequestTimeout:
    return RequestTimeout(f"The answer was not complete within {limit_s:.3g} s, its time limit.")

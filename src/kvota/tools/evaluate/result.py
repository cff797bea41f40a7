"""The JSON of an evaluation, required before a version takes all requests.

    require_good(Path("evaluate.json"), model="m-int8", age_max_s=7 * 86_400, now_s=time.time())

A result counts when it can be read, says `good`, is of the version in question and not too old.
Times are seconds since 1970, for the file may come from another machine.
"""

from pathlib import Path

import msgspec

from kvota.core.errors import KvotaError
from kvota.tools.evaluate.gate import Verdict
from kvota.tools.evaluate.page import FORMAT

AGE_MAX_S = 7 * 86_400.0
CLOCKS_APART_S = 300.0  # a result may seem to come from so far in the future


class NotProven(KvotaError):
    """There is no good evaluation. The message says what is missing."""


class SideRead(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the file that decide; there are more."""

    format: str
    verdict: Verdict
    reason: str
    written_at_s: float
    baseline: SideRead
    candidate: SideRead


def read_result(path: Path) -> Result:
    """Raises NotProven for a file that is missing or not an evaluation."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise NotProven(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise NotProven(f"{path} is no result of `kvota evaluate --out`: {error}.") from None
    if result.format != FORMAT:
        raise NotProven(f"{path} has format {result.format}; this kvota reads {FORMAT}.")
    return result


def require_good(
    path: Path, *, model: str | None = None, age_max_s: float = AGE_MAX_S, now_s: float
) -> Result:
    """The result, if it shows that `model` (None: whatever was evaluated) is good.

    Raises NotProven.
    """
    result = read_result(path)
    if model is not None and result.candidate.model != model:
        raise NotProven(f"{path} is about {result.candidate.model}, not about {model}.")
    age_s = now_s - result.written_at_s
    if not -CLOCKS_APART_S <= age_s <= age_max_s:
        raise NotProven(
            f"{path} is {age_s / 86_400:.1f} days old; at most {age_max_s / 86_400:g} are allowed. "
            "Evaluate again."
        )
    if result.verdict is not Verdict.GOOD:
        raise NotProven(
            f"{path} does not say that {result.candidate.model} is good. {result.reason}"
        )
    return result

"""The JSON of an evaluation, required before a version takes all requests.

    require_good(path, candidate=Served("v2", "m-int8", urls), baseline=…, now_s=time.time())

A result counts when it can be read, says `good`, is of the two versions in question, at the places
where they are served, and not too old. Times are seconds since 1970, for the file may come from
another machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvota.core.errors import KvotaError
from kvota.tools.evaluate.gate import Verdict
from kvota.tools.evaluate.page import FORMAT

AGE_MAX_S = 7 * 86_400.0
CLOCKS_APART_S = 300.0  # a result may seem to come from so far in the future
_HERE: Final = frozenset({"localhost", "::1"})  # other names of 127.0.0.1
_PORTS: Final = {"http": 80, "https": 443}


class NotProven(KvotaError):
    """There is no good evaluation. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Served:
    """A version as a gateway serves it. `urls`: of its backends; None: nobody can say."""

    version: str
    model: str
    urls: Sequence[str] | None = None

    def require(self, side: "SideRead", what: str, path: Path) -> None:
        """Raises NotProven where the `what` of the file at `path` is something else."""
        if side.model != self.model:
            raise NotProven(
                f"The {what} of {path} is {side.model}, not {self.model} (version {self.version})."
            )
        places = None if self.urls is None else [place_of(url) for url in self.urls]
        if places is not None and place_of(side.url) not in places:
            raise NotProven(
                f"The {what} of {path} is {side.model} at {side.url}; version {self.version} is "
                f"served at {', '.join(self.urls or ())}. Evaluate it there."
            )


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
    path: Path,
    *,
    candidate: Served | None = None,
    baseline: Served | None = None,
    age_max_s: float = AGE_MAX_S,
    now_s: float,
) -> Result:
    """The result, if it shows that `candidate` is as good as `baseline` (None: whatever it was).

    Raises NotProven.
    """
    result = read_result(path)
    if candidate is not None:
        candidate.require(result.candidate, "candidate", path)
    if baseline is not None:
        baseline.require(result.baseline, "baseline", path)
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


def place_of(url: str) -> tuple[str, str, int | None, str]:
    """An address by which two spellings of one place are equal."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    path = parts.path.rstrip("/").removesuffix("/v1")
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.scheme, "127.0.0.1" if host in _HERE else host, port, path

"""What a gateway tells a node about a request: whose it is, and how much that tenant weighs.

    client ─▶ gateway (checks the key, drops every such header of the client's) ─▶ node

The headers travel only between the two. A node believes them only where no client can reach it: on
a unix socket, or where the operator says so (`--trust-gateway`). In return it reports, in a form
that the gateway takes out again, how many tokens each request took, and how it went inside:

    x-kvota-usage: prompt=12 cached=0 output=5 lane=short …        header of a complete answer
    : usage prompt=12 cached=0 output=5 lane=short …               last comment of a stream

The request's id and band travel in the headers that clients use too (`x-request-id`,
`x-kvota-priority`), already cleaned and clamped.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import InvalidRequest

ANONYMOUS: Final = "anonymous"  # the tenant where nobody is known
TENANT: Final = b"x-kvota-tenant"
WEIGHT: Final = b"x-kvota-weight"
USAGE: Final = b"x-kvota-usage"
USAGE_COMMENT: Final = b": usage "
_USAGE = re.compile(rb"prompt=(\d+) cached=(\d+) output=(\d+)")
_TIME = rb"(\d+\.\d+|-)"
_COURSE = re.compile(
    rb" lane=(\w+) band=(\w+) preemptions=(\d+) kv_block_s=(\d+\.\d+)"
    rb" queued_s=" + _TIME + rb" first_token_s=" + _TIME + rb" tpot_s=" + _TIME
)

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What only the node knows of how a request went. None: it did not come to that."""

    lane: str
    band: str
    num_preemptions: int = 0
    kv_block_s: float = 0.0
    queued_s: float | None = None
    first_token_s: float | None = None
    time_per_output_token_s: float | None = None

    def encode(self) -> bytes:
        """As the tail of a report; times to tenths of a millisecond."""
        times = (self.queued_s, self.first_token_s, self.time_per_output_token_s)
        said = ("-" if time is None else f"{time:.4f}" for time in times)
        return (
            f" lane={self.lane} band={self.band} preemptions={self.num_preemptions}"
            f" kv_block_s={self.kv_block_s:.4f}"
            " queued_s={} first_token_s={} tpot_s={}".format(*said)
        ).encode()


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Tokens of one HTTP request, over all its prompts and choices, and how it went."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    course: Course | None = None

    def encode(self) -> bytes:
        counts = (self.prompt_tokens, self.cached_tokens, self.output_tokens)
        tail = b"" if self.course is None else self.course.encode()
        return b"prompt=%d cached=%d output=%d" % counts + tail

    def comment(self) -> bytes:
        """The report as an event-stream comment."""
        return b"%b%b\n\n" % (USAGE_COMMENT, self.encode())


def read_usage(text: bytes) -> UsageReport | None:
    """The report that `text` begins with; None when it is none."""
    found = _USAGE.match(text)
    if found is None:
        return None
    prompt, cached, output = map(int, found.groups())
    return UsageReport(prompt, cached, output, _read_course(text, found.end()))


def _read_course(text: bytes, at: int) -> Course | None:
    found = _COURSE.match(text, at)
    if found is None:
        return None
    lane, band, preemptions, kv_block_s, *times = found.groups()
    queued_s, first_token_s, tpot_s = (None if one == b"-" else float(one) for one in times)
    return Course(
        lane=lane.decode(),
        band=band.decode(),
        num_preemptions=int(preemptions),
        kv_block_s=float(kv_block_s),
        queued_s=queued_s,
        first_token_s=first_token_s,
        time_per_output_token_s=tpot_s,
    )


def told(tenant: str, weight: float) -> RawHeaders:
    """The headers of a gateway for its node. A tenant's name may hold any character."""
    return [(TENANT, tenant.encode("utf-8")), (WEIGHT, repr(weight).encode())]


def tenant_of(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(TENANT, b"").decode("utf-8", "replace") or ANONYMOUS


def weight_of(headers: Mapping[bytes, bytes]) -> float | None:
    """Raises InvalidRequest for what is no weight; only a gateway of another version does that."""
    given = headers.get(WEIGHT)
    if given is None:
        return None
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise InvalidRequest("The header x-kvota-weight must be a number above 0.", param="weight")
    return weight

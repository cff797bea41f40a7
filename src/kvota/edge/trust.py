"""What a gateway tells a node about a request: whose it is, and how much that tenant weighs.

    client ─▶ gateway (checks the key, drops every such header of the client's) ─▶ node

The headers travel only between the two. A node believes them only where no client can reach it: on
a unix socket, or where the operator says so (`--trust-gateway`). In return it reports, in a form
that the gateway takes out again, how many tokens each request took:

    x-kvota-usage: prompt=12 cached=0 output=5        header of a complete answer
    : usage prompt=12 cached=0 output=5               last comment of a stream

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

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Tokens of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def encode(self) -> bytes:
        counts = (self.prompt_tokens, self.cached_tokens, self.output_tokens)
        return b"prompt=%d cached=%d output=%d" % counts

    def comment(self) -> bytes:
        """The report as an event-stream comment."""
        return b"%b%b\n\n" % (USAGE_COMMENT, self.encode())


def read_usage(text: bytes) -> UsageReport | None:
    """The report that `text` begins with; None when it is none."""
    found = _USAGE.match(text)
    return UsageReport(*map(int, found.groups())) if found else None


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

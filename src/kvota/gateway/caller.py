"""Who is calling: what the door knows of a request after it has looked at the key.

A Caller is built once when keys are loaded and then shared by all requests of that key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvota.core.request import Band

ANONYMOUS_ID: Final = "anonymous"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may take. None: no limit. Tokens are prompt and output together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def is_unlimited(self) -> bool:
        return (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.concurrent_requests is None
        )


NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever holds a key. `key_id` is public: it may stand in logs, never in metric labels."""

    key_id: str
    tenant: str
    models: frozenset[str] | None = None  # None: all
    weight: float = 1.0  # share of tokens between tenants
    band_max: Band = Band.INTERACTIVE  # BATCH: everything this key asks is batch
    is_admin: bool = False
    may_fall_back: bool = True
    limits: KeyLimits = NO_LIMITS
    model_limits: Mapping[str, KeyLimits] = field(default_factory=dict)

    def may_use(self, *names: str) -> bool:
        """`names`: all those that one model has."""
        return self.models is None or not self.models.isdisjoint(names)

    def limits_on(self, *names: str) -> KeyLimits:
        """On one model, whichever of its names the limits were given for."""
        found = (self.model_limits[name] for name in names if name in self.model_limits)
        return next(found, NO_LIMITS)

    def band(self, wanted: Band) -> Band:
        """The band a request really gets: what it wants, but no better than the key allows."""
        return wanted if wanted > self.band_max else self.band_max


def anonymous() -> Caller:
    """Everybody, where the server runs open on loopback: whoever can connect owns the machine."""
    return Caller(key_id=ANONYMOUS_ID, tenant=ANONYMOUS_ID, is_admin=True)

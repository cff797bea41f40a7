"""Which model answers instead when the asked one is overloaded or fails.

    [models]  large → medium → small        chain("large") = ("large", "medium", "small")

A chain is finite by construction: every model has at most one fallback, chains are followed once,
when the table is built, and a model that would come up twice is refused there with its loop spelled
out. What runs later is a walk along a tuple.

**Above a threshold** means: every replica that may serve is, so no client is sent to a lesser model
while one replica has room. Whether a key allows it is the caller's business (`may_fall_back`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.routing import Replica

CHAIN_MAX: Final = 8  # models


class FallbackTable:
    """The chains of all models. Raises ConfigError for unknown models and for loops."""

    def __init__(self, fallbacks: Mapping[str, str | None]) -> None:
        """`fallbacks`: every model name that a route has, and its fallback if it has one."""
        for model, fallback in fallbacks.items():
            if fallback is not None and fallback not in fallbacks:
                raise ConfigError(
                    f"The fallback of {model!r} is {fallback!r}, which is no model here; "
                    f"models are {', '.join(sorted(fallbacks))}."
                )
        self._chains: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {model: _followed(model, fallbacks) for model in fallbacks}
        )

    def chain(self, model: str) -> tuple[str, ...]:
        """The model and then its fallbacks, each once. KeyError for an unknown model."""
        return self._chains[model]


def _followed(model: str, fallbacks: Mapping[str, str | None]) -> tuple[str, ...]:
    chain = [model]
    while (following := fallbacks[chain[-1]]) is not None:
        if following in chain:
            loop = " → ".join([*chain[chain.index(following) :], following])
            raise ConfigError(f"Fallbacks must end somewhere; this is a loop: {loop}.")
        chain.append(following)
        if len(chain) > CHAIN_MAX:
            raise ConfigError(
                f"The fallback chain of {model!r} has more than {CHAIN_MAX} models: "
                f"{' → '.join(chain)}."
            )
    return tuple(chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """From where on a route falls back. None: never for that reason."""

    kv_usage: float | None = None  # share of the KV in use, 0 to 1
    waiting: int | None = None  # requests in line

    def __post_init__(self) -> None:
        if self.kv_usage is not None and not 0 < self.kv_usage <= 1:
            raise ConfigError(f"fallback: kv_usage must be in (0, 1], got {self.kv_usage}.")
        if self.waiting is not None and self.waiting < 1:
            raise ConfigError(f"fallback: waiting must be at least 1, got {self.waiting}.")


def is_over_threshold(replica: Replica, threshold: Threshold) -> bool:
    return _over(replica, threshold) is not None


def why_fall_back(replicas: Iterable[Replica], threshold: Threshold) -> str | None:
    """Words for the header and the log when every replica that may serve is over; None: stay.

    None too when no replica may serve: that is a failure, and has its own words. O(replicas).
    """
    reasons = [_over(one, threshold) for one in replicas if one.may_serve]
    if not reasons or None in reasons:
        return None
    return f"{reasons[0]}" + (f" on all {len(reasons)} replicas" if len(reasons) > 1 else "")


def _over(replica: Replica, threshold: Threshold) -> str | None:
    if threshold.kv_usage is not None and replica.kv_usage >= threshold.kv_usage:
        return f"kv_usage at {threshold.kv_usage:.0%} or more"
    if threshold.waiting is not None and replica.waiting >= threshold.waiting:
        return f"waiting at {threshold.waiting} or more"
    return None

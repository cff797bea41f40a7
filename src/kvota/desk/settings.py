"""What the operator may set at the desk, and which combinations make sense."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvota.core.errors import ConfigError


class Admission(StrEnum):
    """Which forecast of KV growth decides whether a ticket fits (`policies.py`)."""

    FORECAST = "forecast"
    RESERVE = "reserve"
    OPTIMISTIC = "optimistic"
    QUANTILE = "quantile"
    RUNNING_LENGTH = "running_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    admission: Admission = Admission.FORECAST
    risk: float = 2.0  # z: standard deviations kept free of the expected peak
    quantile: float = 0.6  # of a request's output length, for `admission = quantile`
    typical_output: int = 1024  # tokens, for `admission = running_length`
    max_running_requests: int = 64  # a request for n choices counts n, here and in the line
    max_waiting_queue: int = 256  # in each band; 0: nobody waits
    long_request_threshold: int = 4000  # prompt tokens; a longer prompt goes to the long lane
    long_request_concurrency: int = 2  # requests of the long lane that hold KV at once
    long_kv_share: float = 0.5  # of the KV budget, for the long lane together
    batch_floor: float = 0.1  # of the service, for the batch band while it waits
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # others weigh 1
    queue_timeout_s: float = 30.0  # arrival to grant; or request_timeout_s, if that is less
    request_timeout_s: float = 120.0  # arrival to end
    first_token_timeout_s: float | None = None  # arrival to first token
    long_first_token_timeout_s: float | None = None  # in the long lane; None: the same
    preempt_after_s: float = 2.0  # the first in the short lane waits this long: pause others
    preempt_min_run_s: float = 2.0  # nobody is paused who has held KV for less
    preemptions_max: int = 2  # of one request, by the desk
    pause_waste_max: float = 0.1  # of the tokens computed, lost to pauses by the desk

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_times()
        self._check_shares()
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ConfigError(f"tenant_weights: {tenant!r} must weigh above 0, got {weight}")

    def first_token_limit_s(self, *, is_long: bool) -> float | None:
        """Arrival to first token, by lane; None: no limit."""
        long_s = self.long_first_token_timeout_s
        return long_s if is_long and long_s is not None else self.first_token_timeout_s

    def _check_counts(self) -> None:
        for name, least in (
            ("typical_output", 1),
            ("max_running_requests", 1),
            ("max_waiting_queue", 0),
            ("long_request_threshold", 1),
            ("long_request_concurrency", 1),
            ("preemptions_max", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def _check_times(self) -> None:
        for name in ("queue_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("preempt_after_s", "preempt_min_run_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("first_token_timeout_s", "long_first_token_timeout_s"):
            first = getattr(self, name)
            if first is not None and not 0 < first <= self.request_timeout_s:
                raise ConfigError(
                    f"{name} must be above 0 and at most request_timeout_s "
                    f"({self.request_timeout_s}), got {first}"
                )

    def _check_shares(self) -> None:
        if not 0 < self.long_kv_share <= 1:
            raise ConfigError(
                f"long_kv_share must be above 0 and at most 1, got {self.long_kv_share}"
            )
        if not 0 <= self.pause_waste_max <= 1:
            raise ConfigError(f"pause_waste_max must be in [0, 1], got {self.pause_waste_max}")
        if not 0 <= self.batch_floor < 1:
            raise ConfigError(f"batch_floor must be in [0, 1), got {self.batch_floor}")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"quantile must be between 0 and 1, got {self.quantile}")
        if not self.risk >= 0:
            raise ConfigError(f"risk must not be negative, got {self.risk}")

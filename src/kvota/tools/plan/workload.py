"""What is asked of the machine: lengths, how many at once, and how fast."""

import math
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import ConfigError

# Means of the Azure conversation trace (2023): a typical chat request.
TYPICAL_PROMPT: Final = 1155
TYPICAL_OUTPUT: Final = 211


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths in tokens, times in seconds. Raises ConfigError for what makes no sense."""

    prompt_tokens: int = TYPICAL_PROMPT
    output_tokens: int = TYPICAL_OUTPUT
    longest_tokens: int | None = None  # longest prompt + output; None: as long as model and KV can
    users: int = 16  # requests in flight at the busiest moment
    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "users"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not all(0 < target < math.inf for target in (self.ttft_s, self.tpot_s)):
            raise ConfigError("the targets for TTFT and TPOT must be above 0 seconds, and finite.")
        if self.longest_tokens is not None and self.longest_tokens < self.typical_tokens:
            raise ConfigError(
                f"the longest request has {self.longest_tokens} tokens, fewer than a typical one "
                f"({self.prompt_tokens} + {self.output_tokens})."
            )

    @property
    def typical_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that a request in flight holds on average while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2

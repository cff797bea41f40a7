"""How the tokens of one step are divided.

    max_num_batched_tokens
    [ decodes: one each ][ prompts in progress, then new ones                     ]
                         [ long prompts together ≤ share ][ short ones, the rest  ]

Nobody starves, because whoever comes later always keeps a `KEPT_SHARE` of what is at hand: prompts
in progress against decodes, a long prompt against short ones. How large the share of long prompts
is in this step, `long_share.py` says.
"""

from dataclasses import dataclass

from kvota.core.errors import ConfigError

KEPT_SHARE = 8  # one eighth


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the operator allows. Raises ConfigError for values that make no sense."""

    max_num_batched_tokens: int = 512  # tokens of one step
    max_running_requests: int = 64  # sequences; a request for n choices counts n
    long_prefill_threshold: int = 512  # a prompt is long with more than this to compute in all
    long_prefill_share: float = 0.5  # of the tokens that decodes leave, for long prompts together
    max_prompt_logprob_tokens: int = 128  # per step; each needs a whole row of logits
    min_run_tokens: int = 16  # sampled before a sequence may be preempted (again)
    max_consecutive_preemptions: int = 2  # of the same sequence in a row
    speculative_tokens: int = 0  # guessed of one sequence in one step, at most
    watermark: float = 0.01  # of all blocks, left available when a sequence is admitted

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_running_requests",
            "long_prefill_threshold",
            "max_prompt_logprob_tokens",
            "max_consecutive_preemptions",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("min_run_tokens", "speculative_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.long_prefill_share <= 1:
            raise ConfigError(
                f"long_prefill_share must be above 0 and at most 1, got {self.long_prefill_share}"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")


class StepBudget:
    """What is left of one step's tokens. `room` says how much may be taken, `take` takes it."""

    __slots__ = ("_kept_for_long", "_limits", "_logprob_room", "_long_room", "left")

    def __init__(self, limits: SchedulerLimits) -> None:
        self.left = limits.max_num_batched_tokens
        self._limits = limits
        self._logprob_room = limits.max_prompt_logprob_tokens
        self._long_room = 0
        self._kept_for_long = 0

    @property
    def left_for_new(self) -> int:
        """What sequences that are not admitted yet may take."""
        return self.left - self._kept_for_long

    def decodes_max(self, *, has_prompts: bool) -> int:
        """How many sequences may decode, so that prompts in progress keep something."""
        return self.left - _kept(self.left) if has_prompts else self.left

    def open_prompts(self, *, has_long: bool, share: float) -> None:
        """Decodes are served. `has_long`: a long prompt is in progress; `share`: of what is left,
        for long prompts together; 0: this step is not for them."""
        self._long_room = max(1, int(share * self.left)) if self.left and share else 0
        self._kept_for_long = _kept(self.left) if has_long and share else 0

    def is_long(self, num_to_read: int) -> bool:
        """Whether a prompt with so many tokens to compute, begun or not, is long.

        What remains of it does not matter: a long prompt's last part would overtake everybody.
        """
        return num_to_read > self._limits.long_prefill_threshold

    def room(self, num_remaining: int, *, is_long: bool, wants_logprobs: bool) -> int:
        """How many of `num_remaining` prompt tokens may be computed in this step."""
        most = min(self.left, self._long_room) if is_long else self.left - self._kept_for_long
        if wants_logprobs:
            most = min(most, self._logprob_room)
        return max(0, min(most, num_remaining))

    def take(self, num_tokens: int, *, is_long: bool, wants_logprobs: bool) -> None:
        """Use up what `room` allowed."""
        self.left -= num_tokens
        if is_long:
            self._long_room -= num_tokens
            self._kept_for_long = 0
        if wants_logprobs:
            self._logprob_room -= num_tokens


def _kept(num_tokens: int) -> int:
    return max(1, num_tokens // KEPT_SHARE) if num_tokens else 0

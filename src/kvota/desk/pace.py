"""How fast the engine is, learned from what the desk sees.

Three measured things, all forgetting slowly:
- decoding: tokens per second of one lease;
- reading a prompt: seconds from grant to first token, as a + b × uncached tokens (least squares);
- honesty: by what factor waits were longer than predicted.
"""

import numpy as np

_DECODE_MEMORY = 0.995  # of 1 per observation: the last 200 or so count
_PROMPT_MEMORY = 0.98
_HONESTY_MEMORY = 0.9
_HONESTY_MAX = 2.0


class Pace:
    """Speeds of the engine. None while nothing has been seen."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._moments = np.zeros(5)  # Σ 1, x, y, x², xy over prompts: x tokens, y seconds
        self._predicted_s = 0.0
        self._actual_s = 0.0

    def decoded(self, num_tokens: int, seconds: float) -> None:
        """One lease took `seconds` for its next `num_tokens`."""
        self._tokens = self._tokens * _DECODE_MEMORY + num_tokens
        self._seconds = self._seconds * _DECODE_MEMORY + seconds

    def read_prompt(self, uncached_tokens: int, seconds: float) -> None:
        """A lease took `seconds` from its grant to its first token."""
        x, y = float(uncached_tokens), seconds
        self._moments = self._moments * _PROMPT_MEMORY + np.array((1.0, x, y, x * x, x * y))

    def waited(self, predicted_s: float, actual_s: float) -> None:
        """A ticket was granted after `actual_s`; the uncorrected prediction was `predicted_s`."""
        self._predicted_s = self._predicted_s * _HONESTY_MEMORY + predicted_s
        self._actual_s = self._actual_s * _HONESTY_MEMORY + actual_s

    @property
    def step_s(self) -> float | None:
        """Seconds per token of one lease."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def honesty(self) -> float:
        """Multiply a predicted wait by this."""
        if self._predicted_s <= 0:
            return 1.0
        return min(max(self._actual_s / self._predicted_s, 1 / _HONESTY_MAX), _HONESTY_MAX)

    def first_token_s(self, uncached_tokens: int) -> float:
        """Seconds from grant to first token; 0 while nothing is known."""
        num, x, y, xx, xy = (float(moment) for moment in self._moments)
        if num == 0:
            return 0.0
        spread = num * xx - x * x
        slope = (num * xy - x * y) / spread if spread > 1e-9 * num * xx else 0.0
        slope = max(slope, 0.0)
        return max((y - slope * x) / num, 0.0) + slope * uncached_tokens

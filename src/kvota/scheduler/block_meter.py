"""How much KV memory a request has used: its blocks, integrated over the time it held them."""


class BlockMeter:
    """Told whenever the number of blocks changes; exact between two such moments."""

    def __init__(self) -> None:
        self._block_s = 0.0
        self._num_blocks = 0
        self._since_s = 0.0

    def hold(self, num_blocks: int, now: float) -> None:
        """From `now` on it holds `num_blocks`."""
        self._block_s += self._num_blocks * (now - self._since_s)
        self._num_blocks = num_blocks
        self._since_s = now

    @property
    def block_s(self) -> float:
        """Block-seconds until the last change."""
        return self._block_s

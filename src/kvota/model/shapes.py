"""How many different sizes a pass may have: each is paid for once in time, and for good in memory.

The CPU plugin makes kernels for every number of rows that it meets, and keeps them: oneDNN one
primitive for each shape of matrix, the plugin an executor around each. For SmolLM2-135M in int8
that is 0.6 MiB and 20 ms of CPU time for every number of tokens in a pass. Prompts have every
length, so a server would meet each number up to `max_num_batched_tokens`, one after another, for
hours: to an operator it looks like a leak.

So sizes are exact where rows are dear, up to `EXACT_MAX`, which decodes seldom pass, and rounded
up beyond, `SIZES_PER_DOUBLING` to each doubling: on average 1 row in 100 is padding, at most 1 in
33, and memory grows with the logarithm of the largest pass.

    1 2 3 … 63 64 66 68 … 126 128 132 136 … 252 256 264 … 504 512
"""

from typing import Final

EXACT_MAX: Final = 64
SIZES_PER_DOUBLING: Final = 32


def rounded_size(num: int) -> int:
    """The smallest size that a pass may have and that is not below `num`."""
    if num <= EXACT_MAX:
        return num
    doubling = 1 << (num - 1).bit_length()  # num is in (doubling / 2, doubling]
    step = doubling // 2 // SIZES_PER_DOUBLING
    return -(-num // step) * step

"""What prompts have in common, whatever the size of block a trace counts it in.

Ids of a trace name blocks. Here a block is named by all that comes before it too, so that an equal
name means an equal prefix up to and including it, also for traces that hash each block alone.

    ids of 512     [      7      ][      9      ]
    names of 256   [ 7a ][  7b  ][ 9a ][  9b  ]      a name = (chain up to the id it ends in, where)
    names of 1024  [            9b              ]
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from kvota.traffic.arrival import Arrival
from kvota.traffic.numbers import Reuse


def chain_of(ids: Sequence[int]) -> Iterator[int]:
    """One 64-bit name for each id, which depends on it and on all before."""
    name = 0
    for one in ids:
        name = _hash(name, one)
        yield name


def names_of(arrival: Arrival, size: int) -> tuple[int, ...]:
    """53-bit names of its leading blocks of `size` tokens, as far as the trace knows them.

    A last block that the prompt does not fill is named too when the trace names all of it.
    """
    block = arrival.prefix_block
    chain = list(chain_of(arrival.prefix))
    num_known = min(len(chain) * block, arrival.prompt_tokens)
    ends = list(range(size, num_known + 1, size))
    if num_known == arrival.prompt_tokens and num_known % size:
        ends.append(num_known)
    return tuple(_hash(chain[(end - 1) // block], end) >> 11 for end in ends)


class ReuseCount:
    """Add requests in the order in which they came."""

    def __init__(self) -> None:
        self._block_tokens = 0
        self._last_s: dict[int, float] = {}  # by block: its last use
        self._used_again: set[int] = set()
        self._gaps_s: list[float] = []
        self._num_blocks = self._num_hits = self._hit_tokens = self._num_tokens = 0
        self._num_requests = self._num_sharing = 0

    def add(self, arrival: Arrival) -> None:
        if arrival.prefix:
            self._block_tokens = arrival.prefix_block
        names = list(chain_of(arrival.prefix))
        hits = next((at for at, name in enumerate(names) if name not in self._last_s), len(names))
        self._num_requests += 1
        self._num_sharing += hits > 0
        self._num_blocks += len(names)
        self._num_hits += hits
        self._num_tokens += arrival.prompt_tokens
        self._hit_tokens += min(hits * arrival.prefix_block, arrival.prompt_tokens)
        for name in names:
            self._use(name, arrival.at_s)

    def result(self) -> Reuse | None:
        """None when no request had a prefix."""
        if not self._num_blocks:
            return None
        gaps = self._gaps_s or [0.0]
        p50, p90, p99 = (float(value) for value in np.percentile(gaps, [50, 90, 99]))
        num_distinct = len(self._last_s)
        return Reuse(
            block_tokens=self._block_tokens,
            num_blocks=self._num_blocks,
            num_hits=self._num_hits,
            token_share=self._hit_tokens / self._num_tokens,
            num_distinct=num_distinct,
            once_share=1 - len(self._used_again) / num_distinct,
            sharing_requests=self._num_sharing / self._num_requests,
            again_after_s=(p50, p90, p99),
        )

    def _use(self, name: int, at_s: float) -> None:
        before_s = self._last_s.get(name)
        if before_s is not None:
            self._used_again.add(name)
            self._gaps_s.append(at_s - before_s)
        self._last_s[name] = at_s


def _hash(name: int, part: int) -> int:
    content = name.to_bytes(8, "big") + part.to_bytes(8, "big", signed=True)
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")

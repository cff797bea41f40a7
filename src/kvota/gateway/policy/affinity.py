"""Where the KV of a prompt probably lies: hashing without memory, and a small memory of prefixes.

**Rendezvous hashing** (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM ToN 1998): every owner gets a score hash(key, owner) and the highest wins. Without an
owner only its own keys move, each to its second choice; with a new one only the keys it wins. All
gateways agree without talking. With weights (the logarithmic method of Schindelhauer and
Schomaker, SPAA 2005): score = −weight / ln u with u the hash in (0, 1); an owner then gets its
weight's share of the keys, and a changed weight moves keys only to or from that owner.

**Prefix memory**: an approximate picture of every replica's prefix cache, kept by the router from
what it sent there (the idea of SGLang's router, without a tree). A text is cut at fixed, growing
positions, and each cut is the hash of everything before it:

    text    │ 256 │  320  │   400   │    500    │   …            each cut a quarter further
    chain     h0    h1       h2          h3                      h3 covers all four pieces

A text that continues another has the same first hashes. Cuts are the same for all texts, so a match
is known within a fifth of its length, and 32 of them reach 259,000 characters.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Final

_FIRST_CUT: Final = 256  # characters
_CUT_GROWTH: Final = 1.25
CUTS_MAX: Final = 32
_CUTS: Final = tuple(
    accumulate(range(CUTS_MAX - 1), lambda cut, _: int(cut * _CUT_GROWTH), initial=_FIRST_CUT)
)
_HOLDERS_MAX: Final = 8  # replicas remembered for one prefix, the latest ones


def hash64(*parts: str) -> int:
    """64 bits that depend on all parts and on where one ends and the next begins.

    The same in every process and on every machine, unlike the language's own hash.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "big")


def rendezvous_score(key: str, owner: str, weight: float = 1.0) -> float:
    """The owner with the highest score has the key. `weight` above 0. Uniform u avoids 0 and 1."""
    uniform = ((hash64(key, owner) >> 11) + 0.5) / 2**53
    return -weight / math.log(uniform)


def rendezvous_owner(key: str, weights: Mapping[str, float]) -> str | None:
    """Who has the key; None when nobody weighs more than 0. Ties go to the lesser name."""
    best: tuple[float, str] | None = None
    for owner in sorted(weights):
        if (weight := weights[owner]) > 0:
            score = rendezvous_score(key, owner, weight)
            if best is None or score > best[0]:
                best = (score, owner)
    return None if best is None else best[1]


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """The cuts of one text. `hashes[i]` stands for its first `_CUTS[i]` characters."""

    hashes: tuple[int, ...] = ()
    length: int = 0  # characters

    def share(self, depth: int) -> float:
        """The part of the text that its first `depth` cuts cover, in [0, 1]."""
        return _CUTS[depth - 1] / self.length if depth else 0.0


NO_PREFIX: Final = PrefixChain()


def prefix_chain(text: str, salt: str = "") -> PrefixChain:
    """O(length). `salt`: whatever keeps KV apart (model, adapter, cache salt).

    Texts shorter than the first cut have no chain: there is little to save.
    """
    ends = [cut for cut in _CUTS if cut <= len(text)]
    running = blake2b(salt.encode("utf-8", "surrogatepass") + b"\0", digest_size=8)
    hashes = []
    for start, end in pairwise([0, *ends]):
        running.update(text[start:end].encode("utf-8", "surrogatepass"))
        hashes.append(int.from_bytes(running.digest(), "big"))
    return PrefixChain(tuple(hashes), len(text))


class PrefixMemory:
    """Which replicas have lately read which prefixes. At most `entries_max` cuts.

    The cut that was longest out of use is forgotten first, and of one text the deepest first, so
    what is left of a chain always begins at its start. Every call is O(cuts of the chain).
    """

    def __init__(self, entries_max: int = 32_768) -> None:
        self._entries_max = entries_max
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._incarnations: dict[str, int] = {}  # of replicas: a new one after its cache was lost
        self._num_incarnations = 0

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, chain: PrefixChain, replica: str) -> None:
        """The replica has read, or is reading, the text."""
        own = self._incarnations.get(replica)
        if own is None:
            own = self._num_incarnations
            self._incarnations[replica] = own
            self._num_incarnations += 1
        for cut in reversed(chain.hashes):
            others = (one for one in self._holders.get(cut, ()) if one != own)
            self._holders[cut] = (own, *others)[:_HOLDERS_MAX]
            self._holders.move_to_end(cut)
        while len(self._holders) > self._entries_max:
            self._holders.popitem(last=False)

    def depths(self, chain: PrefixChain, replicas: Iterable[str]) -> dict[str, int]:
        """How many cuts of the chain each replica holds without a gap; none: it is left out."""
        searched = {
            own: replica
            for replica in replicas
            if (own := self._incarnations.get(replica)) is not None
        }
        depths: dict[str, int] = {}
        for depth, cut in enumerate(chain.hashes, start=1):
            holders = self._holders.get(cut, ())
            searched = {own: searched[own] for own in holders if own in searched}
            if not searched:
                break
            depths.update(dict.fromkeys(searched.values(), depth))
        return depths

    def forget(self, replica: str) -> None:
        """The replica has lost its cache (it restarted), or is gone. O(1)."""
        self._incarnations.pop(replica, None)

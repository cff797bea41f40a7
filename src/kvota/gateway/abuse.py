"""Whoever hammers the door with what fails is shut out for a while, and longer each time.

    failures │ · ·  · ··· ·········  │ blocked 60 s │ ····· │ blocked 120 s │ …  quiet ─▶ forgiven
             └ `failures_max` within `window_s` ──┘

A suspect is a key or an address. Its failures leak out of a bucket at `failures_max / window_s`
per second; when the bucket is full, the suspect is blocked for `block_s`, doubled with every block
up to `block_max_s`. After `forgive_after_s` without a block the next one is short again.

A failure is whatever the caller should have known better: a bad key, a forbidden model, invalid
requests, filtered text, limits it keeps running into. Not: what the service or a backend did.

Pure: `now` comes in, in seconds of any steady clock. Memory is bounded: of more than
`suspects_max` suspects the longest silent one is forgotten. All addresses of an IPv6 network of
64 bits are one suspect, for that is what one customer gets.
"""

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvota.core.errors import Limit, RateLimited

_DOUBLINGS_MAX: Final = 32


class Suspicion(StrEnum):
    """What kind of suspect was blocked: the label of the metric."""

    KEY = "key"
    ADDRESS = "address"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseSettings:
    is_on: bool = True
    key_failures_max: int = 100  # within window_s
    address_failures_max: int = 50  # smaller: guessing keys is seen by address only
    window_s: float = 60.0
    block_s: float = 60.0
    block_max_s: float = 3600.0
    forgive_after_s: float = 3600.0
    suspects_max: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A block has begun. For the log and the metrics."""

    suspicion: Suspicion
    suspect: str
    block_s: float
    num_blocks: int  # in a row, this one included


@dataclass(slots=True)
class _Suspect:
    level: float = 0.0  # failures in the bucket at `seen`
    seen: float = 0.0
    num_blocks: int = 0
    blocked_until: float = -math.inf


class AbuseWatch:
    """One per gateway."""

    def __init__(
        self, settings: AbuseSettings, on_blocked: Callable[[Blocked], None] = lambda _: None
    ) -> None:
        self.settings = settings
        self._on_blocked = on_blocked
        self._suspects: OrderedDict[tuple[Suspicion, str], _Suspect] = OrderedDict()

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def check(self, now: float, *, address: str | None, key_id: str | None = None) -> None:
        """Raises RateLimited while the address or the key is blocked.

        Ask with the address before the key is looked at, and again with the key. Knocking at a
        shut door does not lengthen the block.
        """
        if not self._suspects:
            return
        until = -math.inf
        if address is not None:
            until = self._blocked_until(Suspicion.ADDRESS, _network(address), now)
        if key_id is not None:
            until = max(until, self._blocked_until(Suspicion.KEY, key_id, now))
        if until > now:
            raise RateLimited(
                Limit.ABUSE,
                "Too many requests from here have failed lately, so none are taken for "
                f"{math.ceil(until - now)} s. Look at what they were answered.",
                retry_after_s=until - now,
            )

    def failed(self, now: float, *, address: str | None, key_id: str | None = None) -> None:
        """A request failed through its caller's fault. `key_id` only where the key was good.

        A key that was merely claimed must not be given: anybody could get it blocked. Where a good
        key is given, the address is spared, for a whole team may share it.
        """
        if not self.settings.is_on:
            return
        if key_id is not None:
            self._count(Suspicion.KEY, key_id, self.settings.key_failures_max, now)
        elif address is not None:
            most = self.settings.address_failures_max
            self._count(Suspicion.ADDRESS, _network(address), most, now)

    def _count(self, suspicion: Suspicion, name: str, failures_max: int, now: float) -> None:
        suspect = self._seen(suspicion, name)
        if suspect.blocked_until > now:
            return  # requests that were under way when the block began
        leaked = (now - suspect.seen) * failures_max / self.settings.window_s
        suspect.level = max(0.0, suspect.level - leaked) + 1
        suspect.seen = now
        if suspect.level >= failures_max:
            self._block(suspicion, name, suspect, now)

    def _block(self, suspicion: Suspicion, name: str, suspect: _Suspect, now: float) -> None:
        if now - suspect.blocked_until > self.settings.forgive_after_s:
            suspect.num_blocks = 0
        doublings = min(suspect.num_blocks, _DOUBLINGS_MAX)
        block_s = min(self.settings.block_s * 2**doublings, self.settings.block_max_s)
        suspect.num_blocks += 1
        suspect.blocked_until = now + block_s
        suspect.level = 0.0
        self._on_blocked(
            Blocked(
                suspicion=suspicion,
                suspect=name,
                block_s=block_s,
                num_blocks=suspect.num_blocks,
            )
        )

    def _seen(self, suspicion: Suspicion, name: str) -> _Suspect:
        suspect = self._suspects.setdefault((suspicion, name), _Suspect())
        self._suspects.move_to_end((suspicion, name))
        if len(self._suspects) > self.settings.suspects_max:
            self._suspects.popitem(last=False)
        return suspect

    def _blocked_until(self, suspicion: Suspicion, name: str, now: float) -> float:
        suspect = self._suspects.get((suspicion, name))
        if suspect is None:
            return -math.inf
        if suspect.blocked_until > now:
            self._suspects.move_to_end((suspicion, name))  # knocking is not being silent
        return suspect.blocked_until


def _network(address: str) -> str:
    """What one customer has: an IPv4 address, or an IPv6 network of 64 bits."""
    if ":" not in address:
        return address
    try:
        known = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(known) >> 64 << 64, 64)))

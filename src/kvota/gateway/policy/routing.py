"""Which replica gets a request: filter, score, pick.

    all ──filter──▶ may serve ──guard──▶ not overloaded ──▶ holds most of the prefix   (PREFIX)
                        │                               └──▶ home of the conversation (CONVERSATION)
                        └──────────── two at random, the cheaper one ─────────────────▶ (LOAD)

**Filter.** Healthy, not draining, passed by breaker and outlier watch, not tried before.

**Load** of a replica, in units of itself:

    load = KV share in use after this ticket + waiting / (running + 1)

The first term counts only the tokens that the replica must add: what it holds of the prefix is free
(SGLang, vLLM). It may pass 1: then the ticket does not fit. The second is the line in units of
one service time (QLM, arXiv 2407.00047: waiting time ≈ waiting × mean service / running).
`sent` tickets are added until newer figures arrive, times `num_gateways`, because every other
gateway probably does the same.

**Cost** = load + w_latency · log2(latency / fastest), the latter at most one unit.

**Two choices, not the best of all.** Figures are up to a probing interval old. With old figures the
best of all is the same replica for every gateway until the next probe: a herd. Two choices keep
most of the balance (Mitzenmacher 2001: maximum load falls from log n / log log n to log log n)
and none of the herd: of n replicas none is among the two with a probability above 2/n, whatever
the figures say (Mitzenmacher 2000, "How useful is old information?"). With two replicas that is no
bound, so the cheaper one only wins with probability 1 / (1 + e^(−Δcost / uncertainty)): nearly
always when the difference is real, a coin toss when it is within what the figures cannot know.
Both are drawn from those that the ticket fits into right now; the second from the rest where only
one has room, both where none has.

**Affinity under a guard.** A replica that holds more than half of the prompt is worth more than a
little load (Preble, ICLR'25: exploit when cached > recomputed tokens). But only while

    load ≤ guard_ratio · mean load + guard_slack

over those with room for the ticket, or all where none has room (consistent hashing with bounded
loads: Mirrokni, Thorup, Zadimoghaddam, SODA 2018). So a prompt that everybody uses cannot overload
one replica: it spills to the next, which then holds it too.
Without a match, a conversation goes to its home by rendezvous hashing, or the next one in that
order which the guard lets through: no memory, the same on every gateway.

A decision costs O(replicas), and at most `CUTS_MAX` look-ups in the prefix memory.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvota.core.errors import ConfigError
from kvota.gateway.policy.affinity import (
    NO_PREFIX,
    PrefixChain,
    PrefixMemory,
    rendezvous_score,
)
from kvota.gateway.policy.chance import Chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What is known of one backend of a model. Figures may be old; None: not known."""

    id: str
    is_healthy: bool = True
    is_draining: bool = False
    can_pass: bool = True  # by its breaker and the outlier watch
    free_kv_tokens: int | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share in use, 0 to 1
    latency_s: float | None = None  # smoothed; of something that does not grow with the prompt

    @property
    def may_serve(self) -> bool:
        return self.is_healthy and not self.is_draining and self.can_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    latency_weight: float = 0.1  # cost of twice the latency of the fastest
    uncertainty: float = 0.1  # load that figures may miss, as they are not of this moment
    prefix_share_min: float = 0.5  # of the prompt; less is not followed
    guard_ratio: float = 1.25
    guard_slack: float = 0.1
    running_half: int = 16  # this many running count as half full where no KV figure is known
    num_gateways: int = 1  # in front of the same replicas
    prefix_entries_max: int = 32_768  # about 7 MB

    def __post_init__(self) -> None:
        for name, least in (
            ("latency_weight", 0.0),
            ("guard_ratio", 1.0),
            ("guard_slack", 0.0),
            ("running_half", 1),
            ("num_gateways", 1),
            ("prefix_entries_max", 0),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(
                    f"routing: {name} must be at least {least}, got {getattr(self, name)}."
                )
        if not self.uncertainty > 0:
            raise ConfigError(f"routing: uncertainty must be above 0, got {self.uncertainty}.")
        if not 0 < self.prefix_share_min <= 1:
            raise ConfigError(
                f"routing: prefix_share_min must be in (0, 1], got {self.prefix_share_min}."
            )


class Why(StrEnum):
    """What decided. The value is the metric label."""

    PREFIX = "prefix"
    CONVERSATION = "conversation"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Choice:
    replica: Replica
    why: Why
    prefix_share: float  # of the prompt that the replica is thought to hold, 0 to 1
    load: float  # after this ticket


@dataclass(frozen=True, slots=True)
class _Candidate:
    replica: Replica
    depth: int  # cuts of the prompt's chain that it holds
    prefix_share: float
    load: float
    cost: float
    has_room: bool  # the ticket fits and nobody waits


@dataclass(slots=True)
class _Sent:
    """What this gateway sent to a replica since its figures were read."""

    num: int = 0
    tokens: int = 0


class Router:
    """The state of routing for the replicas of one model: sent tickets and remembered prefixes.

    Bounded: one `_Sent` per replica named to `sent` and not yet to `refreshed` or `forget`.
    """

    def __init__(self, settings: RoutingSettings, chance: Chance) -> None:
        self.settings = settings
        self._chance = chance
        self._prefixes = PrefixMemory(settings.prefix_entries_max)
        self._sent: dict[str, _Sent] = {}

    def pick(
        self,
        replicas: Sequence[Replica],
        *,
        ticket_tokens: int,
        prefix: PrefixChain = NO_PREFIX,
        conversation: str | None = None,
        tried: Collection[str] = (),
    ) -> Choice | None:
        """None when nobody may serve. Changes nothing but the state of chance: see `sent`.

        `ticket_tokens`: KV that the request will need, prompt and expected output.
        """
        able = [one for one in replicas if one.may_serve and one.id not in tried]
        if not able:
            return None
        candidates = self._candidates(able, ticket_tokens, prefix)
        guarded = self._within_guard(candidates)
        if matched := self._matched(guarded):
            return _choice(self._of_matched(matched, conversation), Why.PREFIX)
        if conversation is not None:
            return _choice(_at_home(guarded, conversation), Why.CONVERSATION)
        return _choice(self._of_two(candidates), Why.LOAD)

    def sent(self, choice: Choice, ticket_tokens: int, prefix: PrefixChain = NO_PREFIX) -> None:
        """The request went to the chosen replica. Counts there until its next figures."""
        replica = choice.replica.id
        sent = self._sent.setdefault(replica, _Sent())
        sent.num += 1
        sent.tokens += round(ticket_tokens * (1 - choice.prefix_share))
        self._prefixes.record(prefix, replica)

    def refreshed(self, replica_id: str) -> None:
        """New figures were read, which hold what was sent before."""
        self._sent.pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or restarted and lost its prefix cache."""
        self._sent.pop(replica_id, None)
        self._prefixes.forget(replica_id)

    def _candidates(
        self, able: Sequence[Replica], ticket_tokens: int, prefix: PrefixChain
    ) -> list[_Candidate]:
        depths = self._prefixes.depths(prefix, (one.id for one in able))
        fastest_s = min((one.latency_s for one in able if one.latency_s), default=None)
        return [self._candidate(one, ticket_tokens, prefix, depths, fastest_s) for one in able]

    def _candidate(
        self,
        replica: Replica,
        ticket_tokens: int,
        prefix: PrefixChain,
        depths: Mapping[str, int],
        fastest_s: float | None,
    ) -> _Candidate:
        depth = depths.get(replica.id, 0)
        share = prefix.share(depth)
        sent = self._sent.get(replica.id, _Sent())
        gateways = self.settings.num_gateways
        usage = self._usage(replica, ticket_tokens * (1 - share) + sent.tokens * gateways, sent.num)
        num_running = replica.running + sent.num * gateways
        load = usage + replica.waiting / (num_running + 1)
        return _Candidate(
            replica=replica,
            depth=depth,
            prefix_share=share,
            load=load,
            cost=load + self._latency_cost(replica, fastest_s),
            has_room=usage <= 1 and replica.waiting == 0,
        )

    def _usage(self, replica: Replica, added_tokens: float, num_sent: int) -> float:
        """The share of KV in use when `added_tokens` have come; above 1: they do not fit."""
        if replica.free_kv_tokens is None:
            num = replica.running + num_sent * self.settings.num_gateways
            return max(replica.kv_usage, num / (num + self.settings.running_half))
        free_share = 1 - min(max(replica.kv_usage, 0.0), 1.0)
        if replica.free_kv_tokens <= 0 or free_share <= 0:
            return 1 + self.settings.uncertainty  # full, and of a size that nobody told
        return 1 - free_share + added_tokens * free_share / replica.free_kv_tokens

    def _latency_cost(self, replica: Replica, fastest_s: float | None) -> float:
        if not (replica.latency_s and fastest_s):
            return 0.0
        return min(self.settings.latency_weight * math.log2(replica.latency_s / fastest_s), 1.0)

    def _within_guard(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Never empty: the least loaded is below the mean."""
        pool = [one for one in candidates if one.has_room] or candidates
        mean = sum(one.load for one in pool) / len(pool)
        most = self.settings.guard_ratio * mean + self.settings.guard_slack
        return [one for one in pool if one.load <= most]

    def _matched(self, guarded: Sequence[_Candidate]) -> list[_Candidate]:
        """Those that hold the most of the prompt, if that is enough to follow."""
        depth = max((one.depth for one in guarded), default=0)
        return [
            one
            for one in guarded
            if one.depth == depth and one.prefix_share >= self.settings.prefix_share_min
        ]

    def _of_matched(self, matched: Sequence[_Candidate], conversation: str | None) -> _Candidate:
        return self._of_two(matched) if conversation is None else _at_home(matched, conversation)

    def _of_two(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The cheaper of two, most of the time; those with room come first."""
        roomy = [one for one in candidates if one.has_room]
        rest = [one for one in candidates if not one.has_room]
        first = self._drawn_from(roomy or rest)
        second = self._drawn_from(roomy or rest) if roomy or rest else None
        if second is None:
            return first
        return first if self._beats(first, second) else second

    def _drawn_from(self, pool: list[_Candidate]) -> _Candidate:
        """Takes one out of the pool."""
        return pool.pop(int(self._chance.random() * len(pool)))

    def _beats(self, one: _Candidate, other: _Candidate) -> bool:
        difference = (other.cost - one.cost) / self.settings.uncertainty
        return self._chance.random() < 1 / (1 + math.exp(-min(max(difference, -50.0), 50.0)))


def _at_home(candidates: Sequence[_Candidate], conversation: str) -> _Candidate:
    """The first of them in the conversation's own order of replicas."""
    return max(candidates, key=lambda one: rendezvous_score(conversation, one.replica.id))


def _choice(candidate: _Candidate, why: Why) -> Choice:
    return Choice(candidate.replica, why, candidate.prefix_share, candidate.load)

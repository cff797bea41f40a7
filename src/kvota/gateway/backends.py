"""The backends of a gateway, alive: each with its connections, its health and its breaker.

    Backend   upstream · breaker · state (as last probed) · desk, where the gateway keeps one
    Registry  all of them by name; takes in a new set and keeps what did not change, and those of
              which only limits did: their ledgers know who is at work there

An own node is asked through its supervisor whether it is up; every other backend is what its probe
says. Figures are as old as the last probe.
"""

import asyncio
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Final, Protocol

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import ConfigError, Refused
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.edge.settings import EdgeSettings
from kvota.gateway.desk_metrics import DeskMetrics, DeskRecords
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.policy.breaker import Breaker, BreakerSettings
from kvota.gateway.policy.routing import Replica
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.counting import (
    BackendCounter,
    ChatTokenizer,
    EstimatingCounter,
    OpenTokenizer,
    PromptCounter,
    TokenizerCounter,
    no_tokenizer,
)
from kvota.gateway.upstream.foreign_desk import ForeignDesk
from kvota.gateway.upstream.kinds import TRAITS, BackendKind
from kvota.gateway.upstream.probing import BackendState, Prober
from kvota.telemetry.log import Log

KV_TOKENS_UNKNOWN: Final = 100_000  # of a backend that says nothing and for which nothing is set
MODEL_LEN_UNKNOWN: Final = 8192
GUESSED_SHARE: Final = 64
# Of texts that a foreign backend embeds at once; more waits here, where tenants have their turns.
EMBEDDING_TOKENS_UNDER_WAY: Final = 131_072
COUNTS_OLD_S: Final = 0.02
LOOK_AT_ALL_S: Final = 5.0  # an ordinary backend answers its pages, or fails to, within that
PROBE_GRACE_S: Final = 10.0  # from a request's end to its report
CLOSE_AFTER_S: Final = 600.0  # a backend taken out may finish what it answers for so long
# What of an entry may change while its connections, its desk and its breaker stay.
LIVE: Final = (
    "kv_tokens", "kv_share", "tokenizer", "max_running_requests", "max_waiting_queue",
    "max_model_len",
)  # fmt: skip


class Supervised(Protocol):
    """What a backend needs of the supervisor of its process."""

    @property
    def is_up(self) -> bool: ...

    def refusal(self) -> Refused:
        """What clients are told while it does not serve, with when to come back."""


@dataclass(slots=True, eq=False)
class Backend:
    """One engine server. Its desks are None where it admits for itself.

    Texts to embed have a desk of their own: they hold no KV that would outlast their pass, and
    what they teach of paces and lengths says nothing of answers.
    """

    entry: BackendEntry
    upstream: Upstream
    prober: Prober
    breaker: Breaker
    desk: ForeignDesk | None
    embedding_desk: ForeignDesk | None = None
    tokenizer: ChatTokenizer | None = None  # of its model, where the settings name one
    supervised: Supervised | None = None
    state: BackendState = field(default_factory=lambda: BackendState(is_healthy=True))
    is_draining: bool = False
    num_open: int = 0  # attempts under way
    latency_s: float | None = None  # to the first token, smoothed
    answered_s: float = -math.inf  # when it last answered a request well
    _counts: tuple[int, int] = (0, 0)
    _counts_until_s: float = -math.inf
    name: str = field(init=False)
    kind: BackendKind = field(init=False)
    is_own_kind: bool = field(init=False)  # it speaks our dialect to the byte, and prices requests

    def __post_init__(self) -> None:
        self.name, self.kind = self.entry.name, self.entry.kind
        self.is_own_kind = TRAITS[self.kind].has_own_desk

    @property
    def max_model_len(self) -> int:
        return self.entry.max_model_len or self.state.max_model_len or MODEL_LEN_UNKNOWN

    @property
    def may_serve(self) -> bool:
        """As far as its health goes; its breaker has a word of its own."""
        is_up = self.supervised is None or self.supervised.is_up
        return self.state.is_healthy and is_up and not self.is_draining

    @property
    def estimate_max_tokens(self) -> int:
        """Prompts up to so long are priced by a guess, for half of it too much or too little is
        next to nothing of this backend's KV; asking it costs another round trip.
        """
        if self.tokenizer is not None:
            return 0
        capacity = self.state.capacity_tokens or self.entry.kv_tokens or KV_TOKENS_UNKNOWN
        return capacity // GUESSED_SHARE

    def counter(self, model: str) -> PromptCounter:
        """How prompts for `model` are counted here."""
        if self.tokenizer is not None:
            return TokenizerCounter(self.tokenizer)
        form = TRAITS[self.kind].tokenize
        if form is None:
            return EstimatingCounter()
        return BackendCounter(self.upstream, form, model=model)

    def replica(self, now: float, *, is_ejected: bool = False) -> Replica:
        """What routing knows of it."""
        state = self.state
        running, waiting = state.running, state.waiting
        free = None
        if self.desk is not None:
            own_running, own_waiting = self._counted(now)
            running = max(running or 0, own_running)
            waiting = max(waiting or 0, own_waiting)
        if state.capacity_tokens is not None and state.used_tokens is not None:
            free = state.capacity_tokens - state.used_tokens
        return Replica(
            id=self.name,
            is_healthy=self.may_serve,
            can_pass=self.breaker.can_pass(now) and not is_ejected,
            free_kv_tokens=free,
            running=running or 0,
            waiting=waiting or 0,
            kv_usage=state.kv_usage or 0.0,
            latency_s=self.latency_s,
        )

    @property
    def desks(self) -> Sequence[ForeignDesk]:
        """Those that the gateway keeps for it."""
        return [one for one in (self.desk, self.embedding_desk) if one is not None]

    def _counted(self, now: float) -> tuple[int, int]:
        """Requests running and waiting at our desks, at most `COUNTS_OLD_S` old: it costs some."""
        if now >= self._counts_until_s:
            seen = [desk.snapshot() for desk in self.desks]
            running = sum(sum(one.running.values()) for one in seen)
            waiting = sum(sum(one.waiting.values()) for one in seen)
            self._counts = running, waiting
            self._counts_until_s = now + COUNTS_OLD_S
        return self._counts

    def check_change(self, limits: EdgeSettings, entry: BackendEntry) -> None:
        """Raises ConfigError where `follow` could not be called with these now."""
        for desk in self.desks:
            own = _desk_settings(entry, limits)
            desk.check_change(own if desk is self.desk else _of_texts(own))

    def follow(
        self, limits: EdgeSettings, entry: BackendEntry, tokenizer: ChatTokenizer | None
    ) -> None:
        """Go by an entry that differs in what may change (`LIVE`)."""
        self.entry, self.tokenizer = entry, tokenizer
        settings = _desk_settings(entry, limits)
        if self.desk is not None:
            capacity = entry.kv_tokens or KV_TOKENS_UNKNOWN
            self.desk.follow(settings, capacity_tokens=capacity, share=entry.kv_share)
        if self.embedding_desk is not None:
            self.embedding_desk.follow(
                _of_texts(settings), capacity_tokens=EMBEDDING_TOKENS_UNDER_WAY, share=1.0
            )

    def drain(self) -> None:
        """Refuse what is new at our desks, and what waits there."""
        for desk in self.desks:
            desk.drain()

    async def look(self) -> None:
        """Probe it, and correct its desk and its breaker by what it says.

        Of an own node only the figures are taken: whether it is well, its supervisor knows.
        """
        seen = await self.prober.probe()
        if seen.is_healthy and not self.state.is_healthy:
            self.breaker.recovered(seen.probed_s)
        if self.supervised is None or seen.is_healthy:
            self.state = seen
        if self.desk is not None and seen.is_healthy:
            self.desk.correct(seen.reading)

    async def close(self) -> None:
        self.drain()
        await self.upstream.close()


class Registry:
    """All backends. Used on one event loop."""

    def __init__(
        self,
        clock: Clock,
        chance: Random,
        log: Log,
        *,
        open_tokenizer: OpenTokenizer = no_tokenizer,
        limits: EdgeSettings | None = None,
    ) -> None:
        """`limits` are those of every request; the desks in front of foreign backends keep them."""
        self._limits = limits or EdgeSettings()
        self._open_tokenizer = cache(open_tokenizer)  # replicas of one model share it
        self._clock = clock
        self._chance = chance
        self._log = log
        self._backends: dict[str, Backend] = {}
        self._leaving: dict[Backend, asyncio.Task[None]] = {}
        self._looking: dict[Backend, asyncio.Task[None]] = {}
        self.desk_metrics = DeskMetrics()

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def all(self) -> tuple[Backend, ...]:
        return tuple(self._backends.values())

    @property
    def leaving(self) -> Collection[Backend]:
        """Those that a reload has taken out and that finish what they answer: always as of now."""
        return self._leaving.keys()

    def build(
        self, entries: Iterable[BackendEntry], *, environment: Mapping[str, str] = os.environ
    ) -> dict[str, Backend]:
        """Backends for `entries`; those that are here, but for limits, are the same objects.

        Raises ConfigError, and changes nothing. `adopt` makes them the ones in use.
        """
        built: dict[str, Backend] = {}
        for entry in entries:
            here = self._backends.get(entry.name)
            if here is None or not _may_follow(here.entry, entry):
                built[entry.name] = self._new(entry, environment)
                continue
            if here.entry != entry:
                here.check_change(self._limits, entry)
                self._tokenizer_of(entry)
            built[entry.name] = here
        return built

    def add(self, backend: Backend) -> None:
        """A backend that is in no file: the own node."""
        self._backends[backend.name] = backend

    def adopt(self, built: Mapping[str, Backend], entries: Iterable[BackendEntry] = ()) -> None:
        """Use these, as their entries are now, and the own node. Others finish what they answer
        and are closed."""
        kept = {name: one for name, one in self._backends.items() if one.supervised is not None}
        for name, old in self._backends.items():
            if old not in built.values() and name not in kept:
                old.is_draining = True
                self._leave(old)
        self._backends = {**kept, **built}
        for entry in entries:
            if built[entry.name].entry != entry:
                built[entry.name].follow(self._limits, entry, self._tokenizer_of(entry))

    def forget(self) -> None:
        """Ask every backend for its models and limits the next time, whatever it has said."""
        for one in self.all():
            one.prober.forget()

    async def probe_all(self) -> None:
        """Look at every backend once. Never raises.

        Who takes long to say how it is is not waited for, and not asked again meanwhile.
        """
        for one in self.all():
            is_up = one.supervised is None or one.supervised.is_up
            if is_up and one not in self._looking:
                self._looking[one] = asyncio.create_task(self._look(one))
        if self._looking:
            await asyncio.wait(self._looking.values(), timeout=LOOK_AT_ALL_S)

    async def _look(self, one: Backend) -> None:
        was_healthy = one.state.is_healthy
        try:
            await one.look()
        finally:
            del self._looking[one]
        if one.state.is_healthy != was_healthy:
            say = self._log.info if one.state.is_healthy else self._log.warning
            say("backend", backend=one.name, healthy=one.state.is_healthy, why=one.state.why)

    async def close(self) -> None:
        tasks = [*self._leaving.values(), *self._looking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.all():
            await backend.close()

    def _leave(self, backend: Backend) -> None:
        task = asyncio.create_task(_close_when_idle(backend))
        self._leaving[backend] = task
        task.add_done_callback(lambda _: self._leaving.pop(backend))

    def _new(self, entry: BackendEntry, environment: Mapping[str, str]) -> Backend:
        is_ours = TRAITS[entry.kind].has_own_desk
        client = NodeUpstream if is_ours else Upstream
        upstream = client(upstream_settings(entry, environment), self._clock)
        records = None if is_ours else self.desk_metrics.of(entry.name)
        backend = new_backend(
            entry, upstream, self._clock, self._chance, records=records, limits=self._limits
        )
        backend.tokenizer = self._tokenizer_of(entry)
        return backend

    def _tokenizer_of(self, entry: BackendEntry) -> ChatTokenizer | None:
        is_wanted = entry.tokenizer is not None and not TRAITS[entry.kind].has_own_desk
        return self._open_tokenizer(entry.tokenizer) if is_wanted else None


def new_backend(
    entry: BackendEntry,
    upstream: Upstream,
    clock: Clock,
    chance: Random,
    supervised: Supervised | None = None,
    *,
    records: DeskRecords | None = None,
    limits: EdgeSettings | None = None,
) -> Backend:
    """`records` hear of what passes the desk, where the gateway keeps one for it."""
    has_desk = not TRAITS[entry.kind].has_own_desk
    limits = limits or EdgeSettings()
    settings = _desk_settings(entry, limits)
    return Backend(
        entry=entry,
        upstream=upstream,
        prober=Prober(upstream, entry.kind, clock),
        breaker=Breaker(_breaker_settings(limits), chance),
        desk=_desk(entry, settings, clock, records) if has_desk else None,
        embedding_desk=_embedding_desk(settings, clock) if has_desk else None,
        supervised=supervised,
    )


def upstream_settings(entry: BackendEntry, environment: Mapping[str, str]) -> UpstreamSettings:
    """Raises ConfigError, also for a key that is not in the environment."""
    api_key = None
    if entry.api_key_env is not None:
        api_key = environment.get(entry.api_key_env)
        if not api_key:
            raise ConfigError(
                f"backend {entry.name}: the variable {entry.api_key_env}, which should hold its "
                "key, is not set."
            )
    return UpstreamSettings(
        name=entry.name,
        url=entry.url,
        unix_socket=entry.unix_socket,
        api_key=api_key,
        verify_tls=entry.verify_tls,
        connections_max=entry.connections_max,
        first_byte_timeout_s=entry.first_byte_timeout_s,
        idle_timeout_s=entry.idle_timeout_s,
    )


def _breaker_settings(limits: EdgeSettings) -> BreakerSettings:
    """No probe is taken for silent that still answers within the time that every request has."""
    patience_s = limits.request_timeout_s + PROBE_GRACE_S
    return BreakerSettings(probe_timeout_s=max(BreakerSettings().probe_timeout_s, patience_s))


def _may_follow(old: BackendEntry, new: BackendEntry) -> bool:
    """Whether they differ in nothing but what may change."""
    changed = {name: getattr(new, name) for name in LIVE}
    return msgspec.structs.replace(old, **changed) == new


def _desk_settings(entry: BackendEntry, limits: EdgeSettings) -> DeskSettings:
    return DeskSettings(
        max_running_requests=entry.max_running_requests,
        max_waiting_queue=entry.max_waiting_queue,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )


def _desk(
    entry: BackendEntry, settings: DeskSettings, clock: Clock, records: DeskRecords | None
) -> ForeignDesk:
    capacity = entry.kv_tokens or KV_TOKENS_UNKNOWN
    return ForeignDesk(
        clock, settings, capacity_tokens=capacity, share=entry.kv_share, observer=records
    )


def _embedding_desk(settings: DeskSettings, clock: Clock) -> ForeignDesk:
    nothing_to_forecast = Forecast(num_groups_max=1)
    return ForeignDesk(
        clock, _of_texts(settings), capacity_tokens=EMBEDDING_TOKENS_UNDER_WAY,
        forecast=nothing_to_forecast,
    )  # fmt: skip


def _of_texts(settings: DeskSettings) -> DeskSettings:
    """All texts in one lane, in the turns of their tenants."""
    return replace(settings, long_request_threshold=EMBEDDING_TOKENS_UNDER_WAY)


async def _close_when_idle(backend: Backend) -> None:
    try:
        async with asyncio.timeout(CLOSE_AFTER_S):
            while backend.num_open:  # noqa: ASYNC110 - a second more or less does not matter
                await asyncio.sleep(1.0)
    except TimeoutError:
        pass  # what is open now is cut
    finally:
        await backend.close()

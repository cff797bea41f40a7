"""From a model's name to the backends that may answer.

    name or alias ──▶ Route ──▶ version (rollout, sticky) ──▶ replica (routing)
                        └ fallback ──▶ the next Route, and so on

A table is built whole from the settings and swapped whole; a request keeps the one it began with.
Weights that an operator has changed live are carried over to a new table, unless the file itself
has changed them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import msgspec

from kvota.gateway.backends import Backend
from kvota.gateway.caller import Caller
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain
from kvota.gateway.policy.breaker import Permit
from kvota.gateway.policy.fallback import FallbackTable, Threshold, why_fall_back
from kvota.gateway.policy.outliers import Ejection, Outliers, OutlierSettings
from kvota.gateway.policy.rollout import Rollout, Version
from kvota.gateway.policy.routing import Replica, Router, RoutingSettings
from kvota.gateway.policy.watch import TRIPS_OF_A_GOOD_ONE, Verdict, WatchSettings
from kvota.gateway.settings import GatewaySettings, ModelEntry, VersionEntry

LATENCY_SMOOTHING: Final = 0.2  # share of the newest in a backend's latency


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where one attempt goes. The permit must be ended."""

    route: "Route"
    version: str
    model: str  # the name there
    backend: Backend
    permit: Permit

    @property
    def shown_model(self) -> str:
        """What really answers, as clients are told: `chat`, or `chat@v2` where it has versions."""
        return f"{self.route.name}@{self.version}" if self.route.has_versions else self.route.name


@dataclass(slots=True, eq=False)
class Replicas:
    """The backends of one version of a model, and what routing remembers of them."""

    entry: VersionEntry
    model: str
    backends: tuple[Backend, ...]
    router: Router
    outliers: Outliers

    def replicas(self, now: float) -> list[Replica]:
        return [
            one.replica(now, is_ejected=self.outliers.is_ejected(one.name, now))
            for one in self.backends
        ]

    def num_trips(self, now: float) -> int:
        """How often in a row failing calls shut out the backend that is best off.

        0: one of them may be asked, or is away for another reason (a restart, a drain, a hold).
        """
        return min((self._trips(one, now) for one in self.backends), default=0)

    def _trips(self, backend: Backend, now: float) -> int:
        if not backend.may_serve:
            return 0
        if self.outliers.is_ejected(backend.name, now):
            return TRIPS_OF_A_GOOD_ONE  # it was compared with others, and found worse
        return backend.breaker.num_trips_in_row(now)


@dataclass(slots=True, eq=False)
class Route:
    """One model that clients can ask for."""

    entry: ModelEntry
    rollout: Rollout
    versions: Mapping[str, Replicas]
    threshold: Threshold
    created: int = 0
    name: str = field(init=False)
    names: tuple[str, ...] = field(init=False)  # its own, and its aliases
    backends: tuple[Backend, ...] = field(init=False)  # of all versions
    has_versions: bool = field(init=False)  # more than one
    has_choice: bool = field(init=False)  # of backends, so that it matters what is sent where

    def __post_init__(self) -> None:
        self.name = self.entry.name
        self.names = self.name, *self.entry.aliases
        versions = self.versions.values()
        self.backends = tuple(one for version in versions for one in version.backends)
        self.has_versions = len(self.versions) > 1
        self.has_choice = len(self.backends) > 1

    def why_over(self, now: float) -> str | None:
        """Why its fallback should answer instead of making the client wait; None: stay."""
        if self.threshold.kv_usage is None and self.threshold.waiting is None:
            return None
        replicas = [one for version in self.versions.values() for one in version.replicas(now)]
        return why_fall_back(replicas, self.threshold)

    def refreshed(self) -> None:
        """Its backends have been probed: what was sent there is in their figures now."""
        for version in self.versions.values():
            for backend in version.backends:
                version.router.refreshed(backend.name)

    def review(self, now: float) -> list[Ejection]:
        """Compare the replicas of each version; the new ejections."""
        return [
            ejection
            for version in self.versions.values()
            for ejection in version.outliers.review([one.name for one in version.backends], now)
        ]

    def pick(
        self,
        now: float,
        *,
        sticky_key: str,
        ticket_tokens: int,
        prefix: PrefixChain = NO_PREFIX,
        conversation: str | None = None,
        tried: Collection[str] = (),
    ) -> Target | None:
        """None when no backend of it may be asked now. Takes a permit of the one that may."""
        if not self.has_choice:
            return self._only(now, tried)
        chosen = self.rollout.choose(sticky_key).name
        others = [one.name for one in self.rollout.versions if one.weight > 0]
        for name in (chosen, *(other for other in others if other != chosen)):
            version = self.versions[name]
            choice = version.router.pick(
                version.replicas(now),
                ticket_tokens=ticket_tokens,
                prefix=prefix,
                conversation=conversation,
                tried=tried,
            )
            if choice is None:
                continue
            backend = next(one for one in version.backends if one.name == choice.replica.id)
            permit = backend.breaker.may_pass(now)
            if permit is not None:
                version.router.sent(choice, ticket_tokens, prefix)
                return Target(
                    route=self, version=name, model=version.model,
                    backend=backend, permit=permit,
                )  # fmt: skip
        return None

    def turned_away(self, sticky_key: str, given: Target | None, now: float) -> Verdict | None:
        """Note it where a first pick went past the key's own version because that only fails."""
        if not self.has_versions:
            return None
        wanted = self.rollout.choose(sticky_key).name
        num_trips = self.versions[wanted].num_trips(now)
        if not num_trips or (given is not None and given.version == wanted):
            return None
        return self.rollout.turned_away(wanted, num_trips, now)

    def _only(self, now: float, tried: Collection[str]) -> Target | None:
        """The same where there is nothing to choose: no figures are read."""
        [(name, version)] = self.versions.items()
        [backend] = version.backends
        if backend.name in tried or not backend.may_serve:
            return None
        permit = backend.breaker.may_pass(now)
        if permit is None:
            return None
        return Target(route=self, version=name, model=version.model, backend=backend, permit=permit)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """All models. `routes` by public name, in the file's order.

    `untold`: backends that may have further ones, for they have not been heard of yet.
    """

    routes: Mapping[str, Route] = field(default_factory=dict)
    untold: tuple[str, ...] = ()
    _aliases: Mapping[str, str] = field(default_factory=dict)
    _fallbacks: FallbackTable | None = None

    def find(self, name: str) -> Route | None:
        return self.routes.get(self._aliases.get(name, name))

    def names(self) -> list[str]:
        """Every name that clients can use, aliases after their models."""
        return [name for one in self.routes.values() for name in one.names]

    def chain(self, route: Route) -> tuple[Route, ...]:
        """The route and its fallbacks, each once."""
        if self._fallbacks is None:
            return (route,)
        return tuple(self.routes[name] for name in self._fallbacks.chain(route.name))

    @property
    def has_tasks(self) -> bool:
        """The name `auto` means something."""
        return any(one.entry.tasks for one in self.routes.values())

    def for_task(self, task: str, caller: Caller) -> Route | None:
        """The caller's model for a task; the first one that has any when none is for this one.

        Where no model with tasks is the caller's, anybody's, so that it can be told.
        """
        able = [one for one in self.routes.values() if one.entry.tasks]
        able = [one for one in able if caller.may_use(*one.names)] or able
        return next((one for one in able if task in one.entry.tasks), able[0] if able else None)


class RouteBuilder:
    """Makes tables. `chance` decides ties; `created` dates new models, in Unix seconds.

    Raises ConfigError for bounds of a rollout that cannot be.
    """

    def __init__(self, settings: GatewaySettings, chance: Random, *, created: int = 0) -> None:
        self._settings = settings
        self._chance = chance
        self._created = created
        self._watch = WatchSettings(
            failure_margin=settings.rollback_failure_margin,
            ttft_factor=settings.rollback_ttft_factor,
        )

    def build(
        self,
        models: Iterable[ModelEntry],
        backends: Mapping[str, Backend],
        before: RouteTable | None = None,
        *,
        untold: Iterable[str] = (),
    ) -> RouteTable:
        """Raises ConfigError for weights, thresholds and fallbacks that make no sense."""
        entries = list(models)
        fallbacks = FallbackTable({one.name: one.fallback for one in entries})
        old = before.routes if before is not None else {}
        routes = {one.name: self._route(one, backends, old.get(one.name)) for one in entries}
        aliases = {alias: one.name for one in entries for alias in one.aliases}
        return RouteTable(routes, tuple(untold), aliases, fallbacks)

    def _route(
        self, entry: ModelEntry, backends: Mapping[str, Backend], old: Route | None
    ) -> Route:
        entries = entry.all_versions()
        known = old.versions if old is not None else {}
        versions = {
            one.name: self._replicas(entry, one, backends, known.get(one.name)) for one in entries
        }
        return Route(
            entry=entry,
            rollout=self._rollout(entry, versions, old),
            versions=versions,
            threshold=Threshold(kv_usage=entry.fallback_kv_usage, waiting=entry.fallback_waiting),
            created=old.created if old is not None else self._created,
        )

    def _rollout(
        self, entry: ModelEntry, versions: Mapping[str, Replicas], old: Route | None
    ) -> Rollout:
        """The old one where nothing has changed, and its state where only other bounds count."""
        weighed = [
            Version(name=name, model=one.model, weight=one.entry.weight)
            for name, one in versions.items()
        ]
        rollout = Rollout(entry.name, weighed, settings=self._watch)
        if old is not None and old.entry.all_versions() == entry.all_versions():
            if old.rollout.settings == self._watch:
                return old.rollout
            rollout.resume(old.rollout.state)
        return rollout

    def _replicas(
        self,
        model: ModelEntry,
        entry: VersionEntry,
        backends: Mapping[str, Backend],
        old: Replicas | None,
    ) -> Replicas:
        chosen = tuple(backends[name] for name in entry.backends)
        served_as = entry.served_as or model.served_as or model.name
        routing = RoutingSettings(num_gateways=self._settings.num_gateways)
        is_same = old is not None and old.backends == chosen and old.model == served_as
        if old is not None and is_same and old.router.settings == routing:
            return replace(old, entry=entry)  # another weight, but what was learnt holds
        return Replicas(
            entry=entry,
            model=served_as,
            backends=chosen,
            router=Router(routing, self._chance),
            outliers=Outliers(OutlierSettings(), self._chance),
        )

"""Taking in settings: at the start, on a reload, and when backends tell what models they have.

    settings + fleet ──▶ backends (kept where unchanged) ──▶ routes ──▶ Rules ──▶ Live.now

All of it is made before any of it is used. Whatever is wrong raises ConfigError and changes
nothing; requests that are under way keep what they began with.
"""

import importlib.resources
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from random import Random

from kvota.core.errors import ConfigError
from kvota.gateway.abuse import AbuseSettings
from kvota.gateway.backends import Backend, Registry
from kvota.gateway.filters.content import Filters, FilterSettings, load_filters
from kvota.gateway.live import Live, Rules
from kvota.gateway.policy.retries import RetrySettings
from kvota.gateway.policy.tasks import (
    ENTRY_POINT_GROUP,
    SHIPPED_RULES,
    Classifier,
    RuleClassifier,
    load_rules,
)
from kvota.gateway.rollouts import RolloutBook
from kvota.gateway.routes import RouteBuilder
from kvota.gateway.settings import (
    OWN_NODE,
    Fleet,
    GatewaySettings,
    ModelEntry,
)
from kvota.gateway.settings_checks import check_fleet, check_gateway, check_tasks
from kvota.telemetry.log import Log

Settings = tuple[GatewaySettings, Fleet]


@dataclass(slots=True)
class Control:
    """One per gateway. `read` gives the settings anew; `own` is the supervised node."""

    registry: Registry
    rollouts: RolloutBook
    chance: Random
    environment: Mapping[str, str]
    read: Callable[[], Settings]
    log: Log
    own: Backend | None = None
    own_model: str | None = None  # its served name
    created: int = 0  # Unix seconds, of models that nobody dates
    _fleet: Fleet = Fleet()  # noqa: RUF009 - frozen
    _odd: set[str] = field(default_factory=set)  # backends with a model that has no name

    def first(self, settings: GatewaySettings, fleet: Fleet) -> Live:
        """The state to begin with. Raises ConfigError."""
        return Live(self._take(settings, fleet, None), self.registry.leaving)

    def reload(self, live: Live) -> None:
        """Read the settings again and use them. Raises ConfigError, and then nothing changes."""
        settings, fleet = self.read()
        live.now = self._take(settings, fleet, live.now)

    def rediscover(self, live: Live) -> None:
        """Give every backend that no [[models]] names a route for each model it has."""
        old = live.now
        backends = {one.name: one for one in self.registry.all()}
        entries, untold = self._models(self._fleet, backends)
        known = [route.entry for route in old.table.routes.values()]
        if (entries, untold) != (known, old.table.untold):
            builder = self._builder(old.settings)
            table = builder.build(entries, backends, old.table, untold=untold)
            self.rollouts.take_in(table)
            live.now = replace(old, table=table)

    def _take(self, settings: GatewaySettings, fleet: Fleet, old: Rules | None) -> Rules:
        check_gateway(settings)
        check_fleet(fleet, has_own_node=self.own is not None)
        filters, classifier = new_filters(settings), new_classifier(settings)
        if isinstance(classifier, RuleClassifier):
            check_tasks(fleet, classifier.tasks)
        retries, abuse = _retries(settings), _abuse(settings)
        backends = self.registry.build(fleet.backends, environment=self.environment)
        if self.own is not None:
            backends[OWN_NODE] = self.own
        before = old.table if old is not None else None
        models, untold = self._models(fleet, backends)
        table = self._builder(settings).build(models, backends, before, untold=untold)
        self.registry.adopt(backends, fleet.backends)
        self.rollouts.take_in(table)
        self._fleet = fleet
        return Rules(
            settings=settings, table=table, filters=filters, classifier=classifier,
            retries=retries, abuse=abuse,
        )  # fmt: skip

    def _builder(self, settings: GatewaySettings) -> RouteBuilder:
        return RouteBuilder(settings, self.chance, created=self.created)

    def _models(
        self, fleet: Fleet, backends: Mapping[str, Backend]
    ) -> tuple[list[ModelEntry], tuple[str, ...]]:
        """Those of the file, then those that backends offer which no entry of the file names; and
        those of these backends that could not be asked yet what they offer.
        """
        named = {
            name for one in fleet.models for made in one.all_versions() for name in made.backends
        }
        taken = {name for one in fleet.models for name in (one.name, *one.aliases)}
        offered: dict[str, list[str]] = {}
        untold = []
        for name, backend in backends.items():
            if name not in named:
                models = self._offered(backend)
                if models is None and not backend.state.is_healthy:
                    untold.append(name)
                for model in models or ():
                    offered.setdefault(model, []).append(name)
        found = [
            ModelEntry(name=model, backends=tuple(names))
            for model, names in offered.items()
            if model not in taken
        ]
        return [*fleet.models, *found], tuple(untold)

    def _offered(self, backend: Backend) -> Iterable[str] | None:
        """None: it has not said."""
        if backend is self.own and self.own_model is not None:
            return (self.own_model,)
        models = backend.state.models
        if models is None:
            return None
        named = [
            one for one in models if one and one.isprintable()
        ]  # it stands in headers, in logs
        if len(named) < len(models) and backend.name not in self._odd:
            self._odd.add(backend.name)
            odd = next(one for one in models if one not in named)
            why = f"The name of a model is empty, or holds a control character: {odd[:256]!r}."
            self.log.warning("model left out", backend=backend.name, why=why)
        return named


def _retries(settings: GatewaySettings) -> RetrySettings:
    return RetrySettings(attempts_max=settings.attempts_max, budget_ratio=settings.retry_budget)


def _abuse(settings: GatewaySettings) -> AbuseSettings:
    return AbuseSettings(
        is_on=settings.abuse_watch,
        key_failures_max=settings.abuse_failures_max,
        address_failures_max=max(1, settings.abuse_failures_max // 2),
        block_s=settings.abuse_block_s,
    )


def new_filters(settings: GatewaySettings) -> Filters:
    """Raises ConfigError for lists and plug-ins that are not there."""
    return load_filters(
        FilterSettings(
            block_lists=settings.block_lists,
            plugins=settings.filter_plugins,
            on_input=settings.filter_input,
            on_output=settings.filter_output,
        )
    )


def new_classifier(settings: GatewaySettings) -> Classifier:
    """The rules that come with kvota, the operator's, or a plug-in. Raises ConfigError."""
    if settings.classifier is not None:
        return _plugged_in(settings.classifier)
    if settings.task_rules is None:
        shipped = importlib.resources.files("kvota.gateway.policy") / SHIPPED_RULES
        return RuleClassifier(load_rules(shipped.read_text("utf-8"), SHIPPED_RULES))
    try:
        text = Path(settings.task_rules).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task_rules: cannot read {settings.task_rules}: {error}.") from error
    return RuleClassifier(load_rules(text, settings.task_rules))


def _plugged_in(name: str) -> Classifier:
    known = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"No installed package offers the classifier {name!r} (entry point group "
            f"{ENTRY_POINT_GROUP}). Those there are: {there}."
        )
    try:
        made: Classifier = known[name].load()()
    except Exception as error:  # a boundary: the code is somebody else's
        raise ConfigError(f"The classifier {name!r} cannot be made: {error!r}.") from error
    return made

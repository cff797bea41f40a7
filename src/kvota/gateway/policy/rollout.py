"""Several versions of one model side by side, with weights that may change while requests run.

    Rollout("chat")   v1 (stable) ████████████████████ 95
                      v2          █ 5                       set_weights · promote · roll_back

Which version a request gets depends only on its sticky key (API key or conversation) and the
weights: weighted rendezvous hashing (`affinity.py`). So every gateway chooses alike, a conversation
stays where it is, and a changed weight moves only the necessary share: raising v2 moves keys to v2
and none between others, lowering it only moves keys away from it. Only ratios of weights matter.

One version is the stable one; the others are compared with it (`watch.py`). When the watch says
so, a version is rolled back: its weight becomes 0, until an operator gives it one again. Other
weights stay as they are, so only its own keys move.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvota.core.errors import ConfigError
from kvota.gateway.policy.affinity import rendezvous_owner
from kvota.gateway.policy.watch import Verdict, Watch, WatchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    name: str  # unique among the versions; what operators call it
    model: str  # the name its backends know it by
    weight: float  # 0: gets nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """What was changed while requests ran, of every version of one model."""

    stable: str
    weights: Mapping[str, float]
    rolled_back: Mapping[str, str]  # version: why


def choose(versions: Sequence[Version], sticky_key: str) -> Version:
    """The key's version. At least one weighs above 0. O(versions).

    A request without an API key or conversation passes its own id: then weights are shares.
    """
    owner = rendezvous_owner(sticky_key, {one.name: one.weight for one in versions})
    assert owner is not None, "no version has a weight above 0"
    return next(one for one in versions if one.name == owner)


class Rollout:
    """The versions of one public model name. The first is the stable one unless `stable` says.

    Raises ConfigError for duplicate names, negative weights, or no weight above 0.
    """

    def __init__(
        self,
        model: str,
        versions: Sequence[Version],
        *,
        stable: str | None = None,
        settings: WatchSettings,
    ) -> None:
        names = [one.name for one in versions]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{model}: versions must have different names, got {names}.")
        self.model = model
        self._versions = {one.name: one for one in versions}
        self._check_weights(one.weight for one in versions)
        self._stable = self._known(names[0] if stable is None else stable)
        self.settings = settings
        self._watch = Watch(settings, self._stable, self._versions)
        self._rolled_back: dict[str, str] = {}  # version: why

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(self._versions.values())

    @property
    def stable(self) -> str:
        return self._stable

    @property
    def rolled_back(self) -> Mapping[str, str]:
        """Versions that the watch took out, and why. Ends when they are given a weight again."""
        return self._rolled_back

    @property
    def state(self) -> RolloutState:
        return RolloutState(
            stable=self._stable,
            weights={name: one.weight for name, one in self._versions.items()},
            rolled_back=dict(self._rolled_back),
        )

    def choose(self, sticky_key: str) -> Version:
        return choose(self.versions, sticky_key)

    def observe(self, version: str, ok: bool, ttft_s: float | None, now: float) -> Verdict:
        """A call ended. A verdict against a version has already been carried out.

        `ok`: False for what is the version's fault only. `ttft_s`: None where no token came.
        """
        if version not in self._versions:
            return Verdict(version)  # it was taken out of the configuration meanwhile
        return self._carry_out(self._watch.observe(version, ok, ttft_s, now))

    def turned_away(self, version: str, num_trips: int, now: float) -> Verdict:
        """A call wanted the version, whose backends are all left out for their failures.

        As `observe`; `num_trips` as `Watch.turned_away`.
        """
        return self._carry_out(self._watch.turned_away(version, num_trips, now))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change these weights and keep the others; all or none. Raises ConfigError."""
        changed = {name: one.weight for name, one in self._versions.items()}
        for name, weight in weights.items():
            changed[self._known(name)] = weight
        self._check_weights(changed.values())
        for name, weight in weights.items():
            self._weigh(name, weight)
            self._watch.restart(name)
            if weight > 0:
                self._rolled_back.pop(name, None)

    def promote(self, name: str) -> None:
        """The version becomes the stable one and gets all requests."""
        self._stable = self._known(name)
        self._rolled_back.pop(name, None)
        for other in self._versions:
            self._weigh(other, 1.0 if other == name else 0.0)
        self._watch = Watch(self.settings, name, self._versions)

    def roll_back(self, name: str, reason: str) -> None:
        """The version gets nothing more. Its keys go to the others; to the stable one if none.

        Raises ConfigError for the stable version: another has to be promoted first.
        """
        if self._known(name) == self._stable:
            raise ConfigError(
                f"{self.model}: {name!r} is the stable version. Promote another one instead."
            )
        self._weigh(name, 0.0)
        if all(one.weight == 0 for one in self._versions.values()):
            self._weigh(self._stable, 1.0)
        self._watch.restart(name)
        self._rolled_back[name] = reason

    def resume(self, state: RolloutState) -> None:
        """Be as `state` says, all of it or nothing; comparing begins anew where that differs.

        Raises ConfigError for the state of other versions, or weights that cannot be.
        """
        if set(state.weights) != set(self._versions):
            raise ConfigError(
                f"{self.model}: the weights of {sorted(state.weights)} are none for its versions, "
                f"which are {sorted(self._versions)}."
            )
        self._check_weights(state.weights.values())
        if state == self.state:
            return
        self._stable = self._known(state.stable)
        for name, weight in state.weights.items():
            self._weigh(name, weight)
        self._rolled_back = dict(state.rolled_back)
        self._watch = Watch(self.settings, self._stable, self._versions)

    def _carry_out(self, verdict: Verdict) -> Verdict:
        if verdict.reason is not None and self._versions[verdict.version].weight > 0:
            self.roll_back(verdict.version, verdict.reason)
            return verdict
        return Verdict(verdict.version)

    def _weigh(self, name: str, weight: float) -> None:
        self._versions[name] = replace(self._versions[name], weight=float(weight))

    def _known(self, name: str) -> str:
        if name not in self._versions:
            known = ", ".join(self._versions)
            raise ConfigError(f"{self.model} has no version {name!r}; it has {known}.")
        return name

    def _check_weights(self, weights: Iterable[float]) -> None:
        found = list(weights)
        if not all(0 <= weight < float("inf") for weight in found) or not any(found):
            raise ConfigError(
                f"{self.model}: weights must not be negative and one must be above 0, got {found}."
            )

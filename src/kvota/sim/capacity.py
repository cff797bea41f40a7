"""How many replicas a load needs, as the load grows.

Small loads are simulated as they are: the least number of replicas that meets the goal, found by
trying one more at a time. The last third to arrive must meet the goal by itself, so that a backlog
which only grows does not pass because the trace is short. Simulating all of a large load would take
days and tell little more, so above `pool` replicas a part stands for the whole: as much of the load
as `pool` replicas sustain, found by bisection, says what one replica carries, and

    replicas(factor) = ceil(factor · pool / load that the pool sustains)

That is a sample of the users on a sample of the replicas. A larger fleet evens out more than the
pool does, so the answer errs to the safe side; by how much at most, the same figure from half the
pool shows (`gain`). Around the answer it is exact to `RESOLUTION`. Loads of up to `whole_max`
requests are then served by as many replicas as that says, all of them simulated: what came out is
the proof. Should it fail, replicas are added until it holds, or until there are `PROOF_MORE_MAX`
times as many.

More replicas give no request more than a replica of its own. So where the pool is not enough, and
nothing has shown yet that the goal can be met, all requests are served one by one first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from kvota.core.errors import ConfigError
from kvota.sim.crew import Crew
from kvota.sim.desk_door import desk_door
from kvota.sim.fleet import PROBE_EVERY_S, Fleet, FleetResult
from kvota.sim.growth import grown
from kvota.sim.records import Targets
from kvota.sim.shard import NodesPlan
from kvota.sim.simulate import Simulation, judged_of, world_settings
from kvota.traffic.arrival import Arrival

FACTORS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
RESOLUTION = 0.05  # of the load that a pool sustains
ALONE_GAP_S = 3600.0
FACTOR_MIN = 1e-3
STRIDE = 1.25  # between loads, before they are bisected
PROOF_STEP = 0.02  # more replicas when a proof fails
PROOF_MORE_MAX = 2  # times the replicas of the first try
_TO_CHANGE = "Lower --goal, raise --ttft-s or --tpot-s, or give a replica more KV or a faster step."

Watch = Callable[[str, int, int], None]  # what is simulated, requests that have come, and in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityQuestion:
    """`goal`: the share of all requests that must meet the targets.

    `whole_max`: a load of so many requests is simulated whole, on however many replicas; 0: loads
    above the pool never are.
    """

    simulation: Simulation
    targets: Targets
    goal: float = 0.99
    factors: Sequence[float] = FACTORS
    pool: int = 4
    whole_max: int = 0
    probe_every_s: float = PROBE_EVERY_S

    def __post_init__(self) -> None:
        if not 0 < self.goal <= 1:
            raise ConfigError(f"goal must be above 0 and at most 1, got {self.goal}.")
        if self.pool < 2:
            raise ConfigError(f"pool must be at least 2 replicas, got {self.pool}.")
        if not self.factors or min(self.factors) < FACTOR_MIN:
            raise ConfigError(f"factors must be at least {FACTOR_MIN}.")


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """`simulated` is what the answer rests on: this very fleet (`is_exact`), or the pool.

    `is_exact` does not say that one replica fewer would not do, where the pool came first.
    """

    factor: float
    num_requests: int
    rate_rps: float
    num_replicas: int
    is_exact: bool
    simulated: FleetResult


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    points: Sequence[CapacityPoint]
    num_simulated: int  # requests, over all trials
    load_per_replica: float | None  # in recorded loads; None: no pool was needed
    gain: float | None  # how much more a replica carries in the pool than in half of it


def capacity(
    question: CapacityQuestion,
    watch: Watch = lambda *_: None,
    crew: Crew | None = None,
) -> CapacityCurve:
    """`watch` hears how far each trial is. Raises TraceError, and ConfigError when none is enough.

    The nodes live in the processes of `crew`, or in this one; the answer is the same.
    """
    search = _Search(question, watch, crew)
    points: list[CapacityPoint] = []
    pool: _Sustained | None = None
    for factor in sorted(question.factors):
        exact = search.least(factor, points) if pool is None else None
        if exact is not None:
            points.append(search.point(factor, exact.num_replicas, exact, is_exact=True))
            continue
        if pool is None:
            if not any(one.factor >= 1 for one in points):  # less than the load is other requests
                search.check_possible()
            pool = search.sustained(question.pool, _guess(points) * question.pool)
        num = max(ceil(factor / pool.per_replica), question.pool + 1)
        proof = search.proof(factor, num)
        if proof is not None:
            points.append(search.point(factor, proof.num_replicas, proof, is_exact=True))
        else:
            points.append(search.point(factor, num, pool.result, is_exact=False))
    if pool is None:
        return CapacityCurve(points, search.num_simulated, None, None)
    num_half = question.pool // 2
    half = search.sustained(num_half, pool.per_replica * num_half)
    gain = pool.per_replica / half.per_replica - 1
    return CapacityCurve(points, search.num_simulated, pool.per_replica, gain)


def _guess(points: Sequence[CapacityPoint]) -> float:
    """The load of one replica, from the fleets that were enough."""
    return max((one.factor / one.num_replicas for one in points), default=0.5)


@dataclass(frozen=True, slots=True)
class _Sustained:
    """The largest load that a number of replicas sustain."""

    factor: float
    result: FleetResult

    @property
    def per_replica(self) -> float:
        return self.factor / self.result.num_replicas


class _Search:
    def __init__(self, question: CapacityQuestion, watch: Watch, crew: Crew | None) -> None:
        self._question = question
        self._watch = watch
        self._crew = crew
        self._history, self._arrivals = judged_of(question.simulation)
        self._span_s = self._arrivals[-1].at_s or 1.0
        asked = question.simulation
        self._plan = NodesPlan(
            settings=world_settings(asked),
            door=desk_door(asked.desk, self._history) if asked.desk else None,
            seed=asked.seed,
            targets=question.targets,
        )
        self.num_simulated = 0

    def check_possible(self) -> None:
        """Served one by one, the requests must meet the goal: more replicas give no more."""
        alone = [replace(one, at_s=ALONE_GAP_S * at) for at, one in enumerate(self._arrivals)]
        result = self._tried(1, alone, "alone", gives_up=False)
        if not self._is_met(result):
            raise ConfigError(
                f"No number of replicas is enough: alone on a replica, {result.attainment:.1%} of "
                f"{len(alone):,} requests meet the targets ({result.late_attainment:.1%} of the "
                f"last third; {result.num_unserved:,} get no whole answer, as they are too large "
                f"for its KV or its deadlines; TTFT p99 {result.ttft_p99_s:.2f} s, TPOT p99 "
                f"{result.tpot_p99_s:.3f} s), and the goal is {self._question.goal:.1%}. "
                f"{_TO_CHANGE}"
            )

    def least(self, factor: float, points: Sequence[CapacityPoint]) -> FleetResult | None:
        """The smallest fleet that meets the goal; None when it is larger than the pool."""
        load = self._load(factor)
        first = points[-1].num_replicas if points else 1
        for num in range(first, self._question.pool + 1):
            result = self._tried(num, load, f"load x{factor:g}, {num} replicas")
            if self._is_met(result):
                return result
        return None

    def sustained(self, num: int, guess: float) -> _Sustained:
        """What so many replicas sustain, to RESOLUTION."""
        low, high = self._bracket(num, guess)
        while high / low.factor > 1 + RESOLUTION:
            middle = sqrt(low.factor * high)
            if (better := self._sustains(num, middle)) is not None:
                low = better
            else:
                high = middle
        return low

    def proof(self, factor: float, num: int) -> FleetResult | None:
        """The whole load on so many replicas, or on as many more as it takes; None: too large.

        Raises ConfigError when `PROOF_MORE_MAX` times as many are not enough.
        """
        if factor * len(self._arrivals) > self._question.whole_max:
            return None
        load = self._load(factor)
        first, most = num, PROOF_MORE_MAX * num
        while num <= most:
            result = self._tried(num, load, f"load x{factor:g}, all of {num} replicas")
            if self._is_met(result):
                return result
            num += max(1, round(PROOF_STEP * num))
        raise ConfigError(
            f"No number of replicas from {first:,} to {result.num_replicas:,} is enough for "
            f"{factor:g} times the load: with the last, {self._missed(result)}, and the goal is "
            f"{self._question.goal:.1%}. {_TO_CHANGE}"
        )

    def _missed(self, result: FleetResult) -> str:
        if result.is_cut:
            return (
                f"more than {self._bad_max(result.num_requests):,} of {result.num_requests:,} "
                "requests miss the targets"
            )
        return f"{result.late_attainment:.1%} of the last third to arrive meet the targets"

    def point(
        self, factor: float, num: int, simulated: FleetResult, *, is_exact: bool
    ) -> CapacityPoint:
        num_requests = round(factor * len(self._arrivals))
        rate_rps = num_requests / self._span_s
        return CapacityPoint(factor, num_requests, rate_rps, num, is_exact, simulated)

    def _bracket(self, num: int, guess: float) -> tuple[_Sustained, float]:
        """What is sustained, and a larger factor that is not."""
        high = guess
        low = self._sustains(num, guess)
        while low is None:
            high, guess = guess, guess / STRIDE
            if guess < FACTOR_MIN:
                raise ConfigError(f"{num} replicas do not even serve {FACTOR_MIN:g} of this load.")
            low = self._sustains(num, guess)
        while high <= low.factor:
            high = low.factor * STRIDE
            low = self._sustains(num, high) or low
        return low, high

    def _sustains(self, num: int, factor: float) -> _Sustained | None:
        result = self._tried(num, self._load(factor), f"load x{factor:.3g}, {num} replicas")
        return _Sustained(factor, result) if self._is_met(result) else None

    def _load(self, factor: float) -> list[Arrival]:
        load = grown(self._arrivals, factor, self._question.simulation.seed)
        if not load:
            raise ConfigError(
                f"{factor:.3g} times {len(self._arrivals):,} requests is no request at all. "
                "Ask for larger --factors, or take a longer trace."
            )
        return load

    def _is_met(self, result: FleetResult) -> bool:
        goal = self._question.goal
        return not result.is_cut and min(result.attainment, result.late_attainment) >= goal

    def _tried(
        self, num: int, arrivals: Sequence[Arrival], what: str, *, gives_up: bool = True
    ) -> FleetResult:
        fleet = Fleet(num, self._plan, probe_every_s=self._question.probe_every_s, crew=self._crew)
        self.num_simulated += len(arrivals)
        bad_max = self._bad_max(len(arrivals)) if gives_up else None
        self._watch(what, 0, len(arrivals))
        return fleet.run(
            arrivals, bad_max, lambda num_arrived: self._watch(what, num_arrived, len(arrivals))
        )

    def _bad_max(self, num_requests: int) -> int:
        """So many may miss the targets."""
        return int((1 - self._question.goal) * num_requests + 1e-9)

"""A leap is as many turns, to the last bit. The oracle is the same world without leaps."""

from dataclasses import replace
from random import Random

import pytest

from kvota.core.plan import Capacity
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.faults import FaultPlan
from kvota.sim.jitter import Jitter
from kvota.sim.leap import Leaper, Leapt
from kvota.sim.node import NodeSettings
from kvota.sim.random_world import draw_world
from kvota.sim.records import WorldResult
from kvota.sim.workloads import flood, merged
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NUM_WORLDS = 80
PER_TEST = 20
SETTINGS = WorldSettings(
    node=NodeSettings(
        capacity=Capacity(300, 16, 0),
        cost=StepCost(base=0.011, per_prefill_token=7e-5, per_decode=3e-4, per_context=1.7e-7),
        limits=SchedulerLimits(max_num_batched_tokens=256, max_running_requests=16),
    ),
    proof_every=100,
)


def facts(result: WorldResult) -> tuple[object, ...]:
    """All that a result says, and what it is made of."""
    return (
        result.key, result.ended_s, result.span_s, result.kv_used_mean, result.recomputed_tokens,
        [record.output_tokens for record in result.records],
    )  # fmt: skip


def ran(arrivals: list[Arrival], desk: DeskSettings | None, *, leaps: bool) -> WorldResult:
    door = desk_door(desk) if desk else None
    return World(arrivals, replace(SETTINGS, leaps=leaps), seed=3, door=door).run()


def busy(rate_rps: float, output: tuple[int, int] = (1, 120)) -> list[Arrival]:
    """Two tenants; prompts shorter and longer than a step takes."""
    rng = Random(f"busy {rate_rps}")
    streams = [
        flood(rng, tenant=name, rate_rps=rate_rps / 2, duration_s=8.0, prompt=(1, 400),
              output=output, max_tokens=150)
        for name in ("a", "b")
    ]  # fmt: skip
    return merged(*streams)


@pytest.mark.parametrize("first", range(0, NUM_WORLDS, PER_TEST))
def test_seeded_worlds_are_the_same_with_and_without_leaps(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        with_leaps = draw_world(seed, leaps=True, faults=FaultPlan()).run()
        without = draw_world(seed, leaps=False, faults=FaultPlan()).run()
        assert facts(with_leaps) == facts(without), f"seed {seed}"


@pytest.mark.parametrize("rate_rps", [0.5, 9.0])
@pytest.mark.parametrize(
    "desk",
    [
        DeskSettings(max_running_requests=16),
        DeskSettings(max_running_requests=16, admission=Admission.OPTIMISTIC),
        DeskSettings(max_running_requests=16, tenant_weights={"a": 3.0}, preempt_after_s=0.5,
                     long_request_threshold=200),
        None,
    ],
    ids=["forecast", "optimistic", "weights and pauses", "no desk"],
)  # fmt: skip
def test_busy_worlds_are_the_same(rate_rps: float, desk: DeskSettings | None) -> None:
    arrivals = busy(rate_rps)
    assert facts(ran(arrivals, desk, leaps=True)) == facts(ran(arrivals, desk, leaps=False))


def test_worlds_whose_steps_take_longer_by_chance_are_the_same() -> None:
    factors = [0.8, 1.0, 1.7, 0.9, 3.1, 1.0, 1.1]
    jitter = Jitter.of([0.01 * at for at in range(1, 8)], [0.01 * one for one in factors])
    node = replace(SETTINGS.node, jitter=jitter)
    settings = replace(SETTINGS, node=node)
    one, other = (
        World(busy(3.0), replace(settings, leaps=leaps), seed=3).run() for leaps in (True, False)
    )
    assert facts(one) == facts(other)
    assert facts(one) != facts(ran(busy(3.0), None, leaps=True))


def test_most_steps_of_a_quiet_world_are_leapt_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would be empty if none ever were."""
    taken: list[int] = []
    plain = Leaper.leap

    def counted(leaper: Leaper, until_s: float) -> Leapt | None:
        leapt = plain(leaper, until_s)
        taken.append(len(leapt.ends_s) if leapt is not None else 0)
        return leapt

    monkeypatch.setattr(Leaper, "leap", counted)
    result = ran(busy(0.5), DeskSettings(max_running_requests=16), leaps=True)
    assert sum(taken) > 0.7 * result.num_steps
    assert max(taken) > 20


def test_a_world_in_which_things_fail_takes_every_turn() -> None:
    """A fault may strike at any step, so there every step is taken."""
    faulty = replace(SETTINGS, leaps=True, faults=FaultPlan(slow_rate=0.5))
    world = World(busy(3.0), faulty, seed=3)
    slow = world.run()
    assert slow.num_faults > 0.3 * slow.num_steps

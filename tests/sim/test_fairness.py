"""Every world with a desk is held to the VTC bound, whoever built it."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvota.core.plan import Capacity
from kvota.core.request import Band
from kvota.desk.fairness import TenantCounters
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.fairness import Fairness
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord, WorldResult
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

KV_TOKENS = 512
NODE = NodeSettings(
    capacity=Capacity(KV_TOKENS // 16, 16, 0),
    cost=StepCost(base=0.01),
    limits=SchedulerLimits(max_num_batched_tokens=256, max_running_requests=8),
)
DESK = DeskSettings(
    max_running_requests=8, max_waiting_queue=5_000, queue_timeout_s=900, request_timeout_s=900
)


def ask(at_s: float, tenant: str, **fields: object) -> Arrival:
    plain = {"at_s": at_s, "prompt_tokens": 20, "output_tokens": 20, "max_tokens": 40}
    return Arrival(tenant=tenant, **(plain | fields))  # type: ignore[arg-type]


def run(arrivals: Sequence[Arrival], desk: DeskSettings = DESK, *, leaps: bool) -> WorldResult:
    settings = WorldSettings(
        node=NODE, queue_timeout_s=None, request_timeout_s=None, proof_every=100, leaps=leaps
    )
    return World(arrivals, settings, seed=1, door=desk_door(desk)).run()


def flooded(rng: Random, num: int = 150) -> list[Arrival]:
    """Some tenants; the first asks most, all at once or bit by bit."""
    tenants = ["loud", *(f"t{at}" for at in range(rng.randint(1, 3)))]
    gap_s = rng.choice((0.0, 0.02))
    shares = [10.0, *(1.0 for _ in tenants[1:])]
    return [
        ask(
            gap_s * at,
            rng.choices(tenants, shares)[0],
            prompt_tokens=rng.randint(1, 60),
            output_tokens=rng.randint(1, 40),
        )
        for at in range(num)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_policy_and_the_weights_the_bound_holds(seed: int) -> None:
    rng = Random(seed)
    desk = replace(
        DESK,
        admission=rng.choice(list(Admission)),
        tenant_weights={"t0": rng.choice((0.5, 1.0, 4.0))},
    )
    result = run(flooded(rng), desk, leaps=seed % 2 == 0)
    assert result.outcomes == {"completed": 150}


@pytest.mark.parametrize("leaps", [False, True])
def test_a_desk_that_counts_no_service_is_caught(
    monkeypatch: pytest.MonkeyPatch, leaps: bool
) -> None:
    """Then it serves in order of arrival, so the loud one takes what it asks for."""
    monkeypatch.setattr(TenantCounters, "counter", lambda *_: 0.0)
    loud = [ask(0.0, "loud") for _ in range(200)]
    quiet = [ask(0.001, "quiet") for _ in range(20)]
    with pytest.raises(AssertionError, match=r"loud and quiet are .* weighted tokens apart"):
        run([*loud, *quiet], leaps=leaps)


def record(number: int, tenant: str, **fields: object) -> RequestRecord:
    return RequestRecord(number, ask(0.0, tenant, **fields))


@pytest.mark.parametrize(
    "other", [{"band": Band.BATCH}, {"prompt_tokens": 101}, {"prefix": (1,), "prefix_block": 4}]
)
def test_of_tenants_in_other_lines_nothing_is_claimed(other: dict[str, object]) -> None:
    checker = Fairness(10, 10, long_above=100)
    served, others = record(0, "a"), record(1, "b", **other)
    for one in (served, others, record(2, "a"), record(3, "b")):
        checker.arrived(one, 0.0)
    checker.granted(served, 0.0)
    checker.produced(served, 1_000_000, 1.0)
    checker.stepped(1.0)
    assert checker.worst == 0


def test_a_weight_divides_service_and_widens_the_bound_where_it_is_below_one() -> None:
    checker = Fairness(100, 50, weights={"a": 4.0, "b": 0.5})
    assert checker.bound == 2 * 2 * 100 / 0.5
    for number, tenant in enumerate("aabb"):
        checker.arrived(record(number, tenant), 0.0)
    checker.produced(record(0, "a"), 100, 1.0)
    checker.stepped(1.0)
    assert checker.worst == 2 * 100 / 4
    checker.produced(record(2, "b"), 100, 1.0)
    checker.stepped(1.0)
    assert checker.worst == 2 * 100 / 0.5 - 2 * 100 / 4

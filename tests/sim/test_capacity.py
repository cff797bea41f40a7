"""Against fleets that were simulated as they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvota.core.errors import ConfigError
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim import capacity_page
from kvota.sim.capacity import CapacityQuestion, capacity
from kvota.sim.executor import StepCost
from kvota.sim.fleet import Fleet, FleetResult
from kvota.sim.records import Targets
from kvota.sim.simulate import Simulation
from kvota.sim.workloads import flood
from kvota.tools.report.html import render
from kvota.traffic.arrival import Arrival
from kvota.traffic.writing import Target, write_traffic

TARGETS = Targets(ttft_s=1.0, tpot_s=0.2)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """A third of what one replica carries, for ten seconds; without a desk, which costs most."""
    path: Path = tmp_path_factory.mktemp("traffic") / "poisson.csv"
    stream = flood(
        Random(11), tenant="a", rate_rps=10.0, duration_s=10.0, prompt=(20, 60), output=(3, 9),
        max_tokens=9,
    )  # fmt: skip
    with path.open("wb") as file:
        write_traffic(stream, Target.AZURE, file)
    return Simulation(
        trace=path, kv_tokens=6400, cost=StepCost(base=0.05, per_prefill_token=1e-4),
        max_tokens=9, limits=SchedulerLimits(max_running_requests=8, max_num_batched_tokens=512),
        desk=None,
    )  # fmt: skip


def asked(simulation: Simulation, **fields: object) -> CapacityQuestion:
    plain = {"simulation": simulation, "targets": TARGETS, "goal": 0.95, "factors": (1.0,)}
    return CapacityQuestion(**(plain | fields))  # type: ignore[arg-type]


def test_the_sample_agrees_with_the_whole_fleet(simulation: Simulation) -> None:
    """Nine times the load: from a pool of two, and by simulating every replica there is."""
    sampled = capacity(asked(simulation, factors=(9.0,), pool=2))
    whole = capacity(asked(simulation, factors=(9.0,), pool=6))
    [guess], [truth] = sampled.points, whole.points
    assert (guess.is_exact, truth.is_exact) == (False, True)
    assert truth.num_replicas >= 3
    error = guess.num_replicas / truth.num_replicas - 1
    assert abs(error) <= 0.25, (guess.num_replicas, truth.num_replicas)


def test_the_curve_rises_with_the_load_and_says_how_it_is_known(simulation: Simulation) -> None:
    curve = capacity(asked(simulation, factors=(1.0, 4.0, 100.0, 1000.0), pool=2))
    replicas = [one.num_replicas for one in curve.points]
    assert replicas == sorted(replicas)
    assert curve.points[0].is_exact
    assert not curve.points[-1].is_exact
    assert curve.load_per_replica is not None
    assert replicas[-1] == pytest.approx(1000 / curve.load_per_replica, abs=1)
    assert curve.points[-1].num_requests == 1000 * curve.points[0].num_requests
    assert curve.gain is not None
    assert abs(curve.gain) < 0.2


def test_a_goal_that_no_replica_meets_alone_is_refused(simulation: Simulation) -> None:
    with pytest.raises(ConfigError, match=r"alone on a replica, 0\.0% of 99 requests meet"):
        capacity(asked(simulation, targets=Targets(ttft_s=0.01, tpot_s=0.2)))


def with_prompts(simulation: Simulation, tmp_path: Path, *prompts: int) -> Simulation:
    """One request every half second, on the same machine behind a desk."""
    path = tmp_path / "mixed.csv"
    arrivals = [
        Arrival(at_s=0.5 * at, prompt_tokens=tokens, output_tokens=3, max_tokens=9)
        for at, tokens in enumerate(prompts)
    ]
    with path.open("wb") as file:
        write_traffic(arrivals, Target.AZURE, file)
    return replace(simulation, trace=path, desk=DeskSettings())


@pytest.mark.parametrize("whole_max", [0, 10_000])
def test_no_number_is_named_where_requests_late_in_the_trace_are_too_large_for_any_replica(
    simulation: Simulation, tmp_path: Path, whole_max: int
) -> None:
    mixed = with_prompts(simulation, tmp_path, *[40] * 120, *[40, 9000] * 15)
    with pytest.raises(ConfigError, match=r"90\.0% of 150 .*; 15 get no whole answer"):
        capacity(asked(mixed, factors=(1.0, 9.0), pool=2, whole_max=whole_max))


def test_a_rare_request_that_is_too_large_is_no_reason_to_refuse(
    simulation: Simulation, tmp_path: Path
) -> None:
    """Two of the first hundred, and of all 250: within the goal."""
    mixed = with_prompts(simulation, tmp_path, 9000, 9000, *[40] * 248)
    [point] = capacity(asked(mixed, goal=0.99)).points
    assert (point.num_replicas, point.simulated.num_unserved) == (1, 2)


def test_a_proof_that_fails_ends(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fleet above the pool is said to be too small."""
    tried: list[int] = []

    def run(fleet: Fleet, arrivals: Sequence[Arrival], *rest: Any) -> FleetResult:
        result = simulate(fleet, arrivals, *rest)
        tried.append(result.num_replicas)
        return replace(result, late_attainment=0.5) if result.num_replicas > 2 else result

    simulate = Fleet.run
    monkeypatch.setattr(Fleet, "run", run)
    with pytest.raises(
        ConfigError, match=r"from \d to \d+ is enough for 6 times .* 50\.0% of the l"
    ):
        capacity(asked(simulation, factors=(6.0,), pool=2, whole_max=1000))
    assert max(tried) <= 2 * min(num for num in tried if num > 2)


def test_a_share_of_the_load_without_a_request_is_told(
    simulation: Simulation, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"0\.001 times 3 requests is no request at all"):
        capacity(asked(with_prompts(simulation, tmp_path, 9, 9, 9), factors=(0.001,)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"goal": 0.0}, "goal"), ({"pool": 1}, "pool"), ({"factors": ()}, "factors")],
)
def test_questions_without_sense_are_refused(
    simulation: Simulation, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(simulation, **fields)


def test_a_sampled_answer_is_proved_by_the_whole_fleet(simulation: Simulation) -> None:
    curve = capacity(asked(simulation, factors=(6.0, 60.0), pool=2, whole_max=1000))
    proved, sampled = curve.points
    assert (proved.is_exact, sampled.is_exact) == (True, False)
    assert proved.simulated.num_replicas == proved.num_replicas >= 3
    assert proved.simulated.num_requests == proved.num_requests
    assert proved.simulated.attainment >= 0.95


def test_the_watcher_hears_how_far_each_trial_is(simulation: Simulation) -> None:
    heard: list[tuple[str, int, int]] = []
    capacity(asked(simulation), lambda *words: heard.append(words))
    last = {what: num for what, num, _ in heard}
    assert last == {"load x1, 1 replicas": 99}
    assert heard[0] == ("load x1, 1 replicas", 0, 99)


def test_one_seed_gives_one_answer(simulation: Simulation) -> None:
    small = replace(simulation, num_requests_max=50)
    one, same = (capacity(asked(small, factors=(9.0,), pool=2)) for _ in range(2))
    assert one == same


def test_a_page_a_table_and_data_come_of_a_curve(simulation: Simulation) -> None:
    question = asked(simulation, factors=(1.0, 100.0), pool=2)
    curve = capacity(question)
    table = capacity_page.curve_table(curve, 2.5)
    assert [row[0] for row in table.rows] == ["×1", "×100"]
    assert [row[4] for row in table.rows] == ["whole", "pool"]
    last = curve.points[-1]
    assert table.rows[1][-2] == f"{2.5 * last.num_replicas:,.2f}"
    facts = capacity_page.as_json(question, curve, 2.5)
    seconds_for_1000 = 1000 / last.rate_rps
    assert facts["points"][1]["per_1000"] == pytest.approx(
        2.5 * last.num_replicas * seconds_for_1000 / 3600
    )
    page = render(capacity_page.report(question, curve, None))
    assert "<svg" in page
    assert "a pool of 2 sustains" in page

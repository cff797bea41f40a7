import json
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.desk.settings import Admission, DeskSettings
from kvota.sim.executor import StepCost
from kvota.sim.records import Targets
from kvota.sim.simulate import Simulation, report, simulate
from kvota.traffic.arrival import Scaling
from kvota.traffic.traces import open_trace

TRACES = Path("bench/traces")
COST = StepCost(base=0.02, per_decode=1e-4, per_prefill_token=5e-5)
FAST_DESK = DeskSettings(max_running_requests=64)


def asked(trace: str | Path, **fields: object) -> Simulation:
    plain = {"kv_tokens": 60_000, "cost": COST, "desk": FAST_DESK, "num_requests_max": 60}
    return Simulation(trace=TRACES / trace, **(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trace", "fields"),
    [
        ("azure_conv_2023.csv.gz", {}),
        ("mooncake_conversation_head.jsonl.gz", {"scaling": Scaling(length=16)}),
        ("servegen_r1_two_hours.jsonl.gz", {"from_s": 50_400.0, "until_s": 51_000.0}),
    ],
)
def test_every_trace_runs_and_every_request_ends(trace: str, fields: dict[str, object]) -> None:
    result = simulate(asked(trace, **fields))
    assert len(result.records) == 60
    assert sum(result.outcomes.values()) == 60
    assert result.outcomes["completed"] > 30


def test_mooncake_prefixes_hit_the_real_cache_as_the_trace_says() -> None:
    slow = Scaling(time=50.0, length=16)
    result = simulate(
        asked(
            "mooncake_conversation_head.jsonl.gz", scaling=slow, num_requests_max=400,
            block_size=32, kv_tokens=400_000, max_tokens=2048,
        )
    )  # fmt: skip
    with open_trace(TRACES / "mooncake_conversation_head.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    seen: set[int] = set()
    expected = 0
    for row in rows:
        full = row["hash_ids"][: (-(-row["input_length"] // 16) - 1) // 32]
        expected += next((at for at, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
    assert expected > 1_000
    assert sum(record.cached_tokens for record in result.records) // 32 == expected


def test_length_scaling_and_time_stretching_are_reported() -> None:
    result = simulate(asked("azure_conv_2023.csv.gz", scaling=Scaling(time=2.0, length=4)))
    text = report(result, Targets(ttft_s=5.0, tpot_s=0.1))
    assert "time x2, lengths /4" in text
    assert "goodput" in text
    assert "ETA" in text


def test_the_same_seed_gives_the_same_report_and_policies_differ() -> None:
    tight = {"kv_tokens": 20_000, "num_requests_max": 100, "scaling": Scaling(time=0.2)}
    one, same = (simulate(asked("azure_conv_2023.csv.gz", **tight)) for _ in range(2))
    assert one.key == same.key
    reserve = DeskSettings(max_running_requests=64, admission=Admission.RESERVE)
    assert simulate(asked("azure_conv_2023.csv.gz", desk=reserve, **tight)).key != one.key


def test_a_history_is_learned_from_and_not_served() -> None:
    result = simulate(asked("azure_conv_2023.csv.gz", history_share=0.5))
    assert len(result.records) == 30
    assert result.records[0].arrival.at_s == 0.0


def test_without_a_desk_everything_is_taken() -> None:
    result = simulate(asked("azure_conv_2023.csv.gz", desk=None))
    assert result.outcomes == {"completed": 60}


def test_an_unknown_trace_is_said_by_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match=r"notes\.txt: its first line is 'hello'; not a journal"):
        simulate(asked(path))


def test_lengths_that_do_not_divide_a_prefix_block_are_an_operators_error() -> None:
    with pytest.raises(ConfigError, match="does not divide the prefix block of 512"):
        simulate(asked("mooncake_conversation_head.jsonl.gz", scaling=Scaling(length=7)))

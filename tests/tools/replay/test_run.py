"""A whole replay against a backend on this machine: what it is asked, and what is made of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvota.core.errors import ConfigError
from kvota.core.request import Band
from kvota.tools.load.asked import Seen
from kvota.tools.load.lag import Lag
from kvota.tools.load.measure import Slo
from kvota.tools.load.target import Target, find_target
from kvota.tools.replay import show
from kvota.tools.replay.plan import Source, plan_for, read
from kvota.tools.replay.run import Replayed, refusal_of, replay
from kvota.tools.report.html import render
from kvota.traffic.arrival import Arrival, Scaling
from kvota.traffic.writing import Target as Format
from kvota.traffic.writing import write_traffic
from tests.support.counting_backend import counting
from tests.support.fake_backend import FakeBackend, Received, Wire

SLO = Slo(ttft_s=5.0, tpot_s=1.0)


def traffic(tmp_path: Path, arrivals: Sequence[Arrival]) -> Path:
    path = tmp_path / "recorded"
    with path.open("wb") as file:
        write_traffic(arrivals, Format.JOURNAL, file)
    return path


def arrival(at_s: float, prompt: int = 300, output: int = 3, **fields: Any) -> Arrival:
    plain = {"at_s": at_s, "prompt_tokens": prompt, "output_tokens": output, "max_tokens": output}
    return Arrival(**(plain | fields))


async def replayed(
    backend: FakeBackend, path: Path, keys: dict[str, str] | None = None, **source: object
) -> Replayed:
    recorded = read(Source(path=path, **source))  # type: ignore[arg-type]
    target = await find_target(backend.url, None)
    backend.received.clear()
    tenants = {one.tenant for one in recorded.arrivals}
    own = {tenant: (keys or {}).get(tenant) for tenant in tenants}
    return await replay(plan_for(recorded, target), target, own, SLO, drain_s=60.0)


def bodies(backend: FakeBackend) -> list[dict[str, object]]:
    """By the length of their prompts: what is due close together may overtake on its way."""
    return sorted((one.json for one in backend.generations), key=lambda one: len(one["prompt"]))


async def test_all_is_asked_as_it_was_recorded(backend: FakeBackend, tmp_path: Path) -> None:
    path = traffic(tmp_path, [arrival(0.0, 300, 3), arrival(0.05, 5, 7), arrival(0.1, 40, 2)])
    result = await replayed(backend, path)
    asked = bodies(backend)
    assert [len(body["prompt"]) for body in asked] == [5, 40, 300]  # type: ignore[arg-type]
    assert [body["max_tokens"] for body in asked] == [7, 2, 3]
    assert [body["min_tokens"] for body in asked] == [7, 2, 3]
    assert all(body["ignore_eos"] is True and body["stream"] is True for body in asked)
    assert [one.output_tokens for one in result.seen] == [3, 7, 2]
    assert [one.scheduled_s for one in result.seen] == [0.0, 0.05, 0.1]
    measured = result.measured
    assert (measured.num_whole, measured.num_off_length, measured.num_off_prompt) == (3, 0, 0)


async def test_time_and_length_are_scaled(backend: FakeBackend, tmp_path: Path) -> None:
    path = traffic(tmp_path, [arrival(0.0, 320, 32), arrival(1.0, 161, 16)])
    result = await replayed(backend, path, scaling=Scaling(time=0.1, length=16))
    assert [one.scheduled_s for one in result.seen] == [0.0, 0.1]
    assert [len(body["prompt"]) for body in bodies(backend)] == [11, 20]  # type: ignore[arg-type]
    assert [body["max_tokens"] for body in bodies(backend)] == [1, 2]


async def test_shared_prefixes_arrive_as_shared_token_ids(
    backend: FakeBackend, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"prefix": (1, 2), "prefix_block": 256}
    path = traffic(
        tmp_path,
        [arrival(0.0, 600, **shared), arrival(0.05, 700, **shared), arrival(0.1, 599)],
    )
    result = await replayed(backend, path)
    other, first, second = (body["prompt"] for body in bodies(backend))
    assert isinstance(first, list) and isinstance(second, list) and isinstance(other, list)  # noqa: PT018
    assert first[:512] == second[:512]
    assert first[512:560] != second[512:560]
    assert other[:32] != first[:32]
    assert result.cached_share == pytest.approx(0.5, abs=0.01)


async def test_each_tenant_asks_with_its_own_key(backend: FakeBackend, tmp_path: Path) -> None:
    path = traffic(tmp_path, [arrival(0.0, tenant="a"), arrival(0.05, tenant="b")])
    result = await replayed(backend, path, {"a": "sk-a", "b": "sk-b"})
    sent = sorted(one.headers["authorization"] for one in backend.generations)
    assert sent == ["Bearer sk-a", "Bearer sk-b"]
    assert [one.lane for one in result.seen] == ["a", "b"]
    assert "sk-a" not in str(show.as_json(result)) + render(show.report(result))


async def test_choices_and_bands_are_asked_as_recorded(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """A journal of a request for two choices of three tokens, and one of the batch band."""
    path = traffic(tmp_path, [arrival(0.0, n=2), arrival(0.05, band=Band.BATCH)])
    result = await replayed(backend, path)
    several, batch = sorted(backend.generations, key=lambda one: "n" not in one.json)
    assert (several.json["n"], several.json["max_tokens"]) == (2, 3)
    assert "n" not in batch.json
    assert "x-kvota-priority" not in several.headers
    assert batch.headers["x-kvota-priority"] == "batch"
    assert [one.n for one in result.seen] == [2, 1]


async def test_the_first_so_many_and_a_span_of_time(backend: FakeBackend, tmp_path: Path) -> None:
    path = traffic(tmp_path, [arrival(0.1 * at, 10 + at) for at in range(10)])
    result = await replayed(backend, path, requests_max=3)
    assert len(result.seen) == 3
    result = await replayed(backend, path, from_s=0.45, until_s=0.65)
    assert sorted(len(body["prompt"]) for body in bodies(backend)) == [15, 16]  # type: ignore[arg-type]
    assert [one.scheduled_s for one in result.seen] == pytest.approx([0.05, 0.15])


async def test_what_does_not_fit_the_window_is_left_out_and_counted(
    backend: FakeBackend, tmp_path: Path
) -> None:
    backend.gauges.max_model_len = 500
    path = traffic(tmp_path, [arrival(0.0, 499, 2), arrival(0.0, 400, 100)])
    result = await replayed(backend, path)
    assert (len(result.seen), result.plan.num_too_long) == (1, 1)
    assert "1 too long for the model's window" in show.facts(result)["left out"]
    too_long = traffic(tmp_path, [arrival(0.0, 499, 2)])
    with pytest.raises(ConfigError, match="--length-scale"):
        await replayed(backend, too_long)


async def test_refused_requests_are_counted_and_in_no_latency(
    backend: FakeBackend, tmp_path: Path
) -> None:
    path = traffic(tmp_path, [arrival(0.05 * at) for at in range(4)])
    recorded = read(Source(path=path))
    target = await find_target(backend.url, None)
    backend.scripts.extend([refusing, refusing])
    result = await replay(plan_for(recorded, target), target, {"default": None}, SLO)
    measured = result.measured
    assert (measured.num_whole, measured.num_refused) == (2, 2)
    assert measured.ttft is not None
    assert measured.ttft.num == 2
    assert measured.errors == {"queue_full": 2}
    assert ("not served because", "queue_full 2") in show.outcome_table(result).rows
    assert measured.attainment == 0.5


async def refusing(asked: Received, wire: Wire) -> None:
    error = {"message": "full", "type": "overloaded_error", "code": "queue_full"}
    await wire.json({"error": error}, 503, {"retry-after": "3"})


async def test_waiting_for_a_place_at_the_generator_is_waiting(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """Coordinated omission: one place, answers of 0.2 s, all due at once."""
    path = traffic(tmp_path, [arrival(0.0) for _ in range(4)])
    recorded = read(Source(path=path))
    target = await find_target(backend.url, None)

    async def slow(asked: Received, wire: Wire) -> None:
        await wire.pause(0.2)
        await counting(asked, wire)

    backend.script = slow
    result = await replay(
        plan_for(recorded, target), target, {"default": None}, SLO, in_flight_max=1
    )
    first = sorted(one.first_token_s for one in result.seen if one.first_token_s is not None)
    assert [at >= 0.2 * (number + 1) - 0.01 for number, at in enumerate(first)] == [True] * 4
    assert result.refusal is not None
    assert "the generator was the bottleneck" in result.refusal
    assert show.as_json(result)["measured"] is None
    assert "Refused: the generator was the bottleneck" in render(show.report(result))


async def test_a_server_that_answers_nobody_gives_no_result(
    backend: FakeBackend, tmp_path: Path
) -> None:
    path = traffic(tmp_path, [arrival(0.0)])
    recorded = read(Source(path=path))
    target = await find_target(backend.url, None)
    backend.script = refusing
    result = await replay(plan_for(recorded, target), target, {"default": None}, SLO)
    assert result.refusal == "not one request was answered, so there is nothing to measure"
    assert render(show.report(result))


async def test_a_report_has_the_figures_and_the_charts(
    backend: FakeBackend, tmp_path: Path
) -> None:
    path = traffic(tmp_path, [arrival(0.02 * at, tenant=f"t{at % 3}") for at in range(12)])
    result = replace(await replayed(backend, path), refusal=None)
    page = render(show.report(result))
    assert page.count("<svg") == 3
    for text in ("recorded (kvota journal)", "TTFT", "Tenants", "time ×1, lengths ÷1"):
        assert text in page
    facts = show.as_json(result)
    assert (len(facts["requests"]), facts["measured"]["num_whole"]) == (12, 12)
    assert [name for name, *_ in show.tenant_table(result.seen, result).rows] == ["t0", "t1", "t2"]


async def test_text_goes_to_servers_that_take_no_ids(backend: FakeBackend, tmp_path: Path) -> None:
    async def only_text(asked: Received, wire: Wire) -> None:
        if isinstance(asked.json["prompt"], list):
            await wire.json({"error": {"message": "prompt must be a string"}}, 400)
        else:
            await counting(asked, wire)

    backend.script = only_text
    del backend.overrides["/tokenize"]
    shared: dict[str, Any] = {"prefix": (1,), "prefix_block": 256}
    path = traffic(tmp_path, [arrival(0.0, 300, **shared), arrival(0.05, 300, **shared)])
    await replayed(backend, path)
    one, other = (str(body["prompt"]).split() for body in bodies(backend))
    assert one != other
    assert one[:200] == other[:200]


def test_a_late_generator_is_told_by_its_lag(measured_of: Replayed) -> None:
    late = replace(measured_of.measured, lag=Lag(sent_p99_s=9.0))
    assert "the generator was the bottleneck" in (refusal_of(late) or "")
    on_time = replace(measured_of.measured, lag=Lag())
    assert refusal_of(on_time) is None


@pytest.fixture
async def measured_of(backend: FakeBackend, tmp_path: Path) -> Replayed:
    return await replayed(backend, traffic(tmp_path, [arrival(0.0)]))


async def test_the_watcher_hears_of_each_answer(backend: FakeBackend, tmp_path: Path) -> None:
    heard: list[Seen] = []
    recorded = read(Source(path=traffic(tmp_path, [arrival(0.0), arrival(0.01)])))
    target: Target = await find_target(backend.url, None)
    plan = plan_for(recorded, target)
    await asyncio.wait_for(
        replay(plan, target, {"default": None}, SLO, on_ended=heard.append), timeout=60
    )
    assert len(heard) == 2


async def test_an_interrupted_replay_is_judged_until_then(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """Ctrl-C cancels the task: here as soon as the first answer is there."""
    path = traffic(tmp_path, [arrival(0.0), arrival(3600.0)])
    target = await find_target(backend.url, None)
    plan, keys = plan_for(read(Source(path=path)), target), {"default": None}
    running: list[asyncio.Task[Replayed]] = []

    def stop(_: object) -> None:
        running[0].cancel()

    running.append(asyncio.create_task(replay(plan, target, keys, SLO, on_ended=stop)))
    result = await asyncio.wait_for(running[0], 60)
    assert result.interrupted_s is not None
    assert result.measured.num_whole == result.measured.num_due == 1
    assert "interrupted; until then: " in show.verdict(result) or result.refusal is not None
    assert show.as_json(result)["interrupted_s"] == result.interrupted_s
    assert show.as_json(result)["incomplete"] == "interrupted"
    assert show.report(result).is_bad

"""`make chaos` in short, on one event loop: all around a gateway breaks, its books balance."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import aiohttp
import msgspec
import pytest

from bench.chaos import load
from bench.chaos_backends import ChaoticBackend, Monkey, serving
from bench.chaos_clients import Ending, Ledger, Menu, judged
from kvota.core.errors import ConfigError
from kvota.edge.settings import EdgeSettings
from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import ModelEntry, VersionEntry
from kvota.telemetry.journal import read_journal
from tests.support.fake_backend import MODEL, chunk, event, piece
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry

SEED = 20261129
NUM_CLIENTS = 12
ASKED_BY_EACH = 20
PATIENCE_S = 60.0
DONE = b"data: [DONE]\n\n"
CHAT = "/v1/chat/completions"


def rolled() -> ModelEntry:
    old = VersionEntry(name="v1", backends=("a",), served_as=MODEL, weight=0.5)
    new = VersionEntry(name="v2", backends=("c",), served_as=MODEL, weight=0.5)
    return ModelEntry(name="rolled", versions=(old, new))


async def reload_again_and_again(world: GatewayWorld) -> None:
    """With the last backend and without it, and with a file that is wrong."""
    whole, number = world.fleet, 0
    while True:
        await asyncio.sleep(0.1)
        number += 1
        if number % 3 == 0:
            world.broken = "kvota.toml: unknown section [nonsense]."
            with pytest.raises(ConfigError):
                await world.parts.reload()
            world.broken = None
            continue
        few = msgspec.structs.replace(
            whole, backends=whole.backends[:2], models=(model_of("chat", "a", "b"),)
        )
        world.fleet = few if number % 3 == 1 else whole
        await world.parts.reload()


async def until(world: GatewayWorld, name: str) -> None:
    """Wait for a gauge of the gateway to be zero."""
    async with asyncio.timeout(PATIENCE_S):
        while await world.metrics(f"kvota_gateway_{name}"):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.05)


async def test_after_a_storm_every_request_has_ended_once_and_nothing_is_held(
    tmp_path: Path,
) -> None:
    backends = [ChaoticBackend(name, Random(f"{SEED} {name}")) for name in "abc"]
    ledger, journal = Ledger(), tmp_path / "journal"
    patience = {"first_byte_timeout_s": 0.5, "idle_timeout_s": 0.5, "kv_tokens": 4000}
    async with serving(backends), aiohttp.ClientSession() as session:
        entries = [vllm_entry(one.name, one.fake, **patience) for one in backends]
        models = [model_of("chat", "a", "b", "c", fallback="rolled"), rolled()]
        async with gateway_world(
            *entries, models=models, edge=EdgeSettings(queue_timeout_s=2.0),
            journal=str(journal), abuse_watch=False,
        ) as world:  # fmt: skip
            keys = await world.key(), await world.key(limits=KeyLimits(concurrent_requests=3))
            menu = Menu(
                url=f"http://127.0.0.1:{world.port}",
                keys=(*keys, "wrong"),
                models=("chat", "chat", "rolled", "nothing"),
            )
            monkey = Monkey(backends, Random(f"{SEED} monkey"), every_s=0.3)
            troubles = [
                asyncio.create_task(monkey.run()),
                asyncio.create_task(reload_again_and_again(world)),
            ]
            await load(
                menu, ledger, session, SEED, NUM_CLIENTS, lambda number: number <= ASKED_BY_EACH
            )
            for trouble in troubles:
                trouble.cancel()
            ends = await asyncio.gather(*troubles, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ends), ends
            await check_books(world, backends, ledger, journal)
    assert "Traceback" not in world.log


def ids_in(journal: Path) -> Counter[str]:
    return Counter(line.id for line in read_journal(journal.read_bytes().splitlines()))


async def check_books(
    world: GatewayWorld, backends: list[ChaoticBackend], ledger: Ledger, journal: Path
) -> None:
    assert ledger.faults == []
    assert ledger.num_requests == NUM_CLIENTS * ASKED_BY_EACH
    assert len(ledger.endings) >= 4, "a storm in which nothing breaks shows nothing"
    for name in ("requests_open", "backend_requests_open", "backend_requests_running"):
        await until(world, name)
    async with asyncio.timeout(PATIENCE_S):
        while any(one.num_active for one in backends):  # noqa: ASYNC110 - over sockets
            await asyncio.sleep(0.05)
    for backend in world.parts.registry.all():
        assert backend.desk is not None
        backend.desk.check()
        assert backend.desk.snapshot().held_tokens == 0
    ended = ids_in(journal)
    assert [one for one, times in ended.items() if times > 1] == []
    assert ledger.answered <= ended.keys()
    assert ended.keys() <= ledger.answered | ledger.left
    assert await world.metrics("kvota_gateway_requests_total") == ended.total()


@pytest.mark.parametrize("num_turns", range(1, 6))
async def test_a_backend_whose_kill_is_cut_short_is_back_at_once(num_turns: int) -> None:
    """At whichever turn of the loop: a port that stayed taken was waited for without end."""
    backend = ChaoticBackend("a", Random(SEED))
    async with serving([backend]):
        killing = asyncio.create_task(backend.kill(away_s=2 * PATIENCE_S))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        killing.cancel()
        await asyncio.wait([killing], timeout=PATIENCE_S)
        assert killing.cancelled()
        async with aiohttp.ClientSession() as session, session.get(f"{backend.url}/health") as said:
            assert said.status == 200


@pytest.mark.parametrize(
    ("status", "kind", "content", "expected"),
    [
        (200, "text/event-stream", [piece(CHAT, "a"), piece(CHAT, "b", finish="stop")], "stream"),
        (200, "text/event-stream", [piece(CHAT, "a")], None),
        (200, "text/event-stream", [piece(CHAT, "a", finish="stop")] * 2, None),
        (500, "application/json", b'{"error": {}}', None),
        (503, "application/json", b'{"oops": 1}', None),
        (200, "application/json", b'{"choices": []}', None),
    ],
)
def test_the_judge_of_endings_sees_what_is_wrong(
    status: int, kind: str, content: list[dict[str, object]] | bytes, expected: str | None
) -> None:
    if isinstance(content, list):
        content = b"".join(event(chunk(CHAT, [part])) for part in content) + DONE
    ending = judged(status, kind, content, 1)
    if expected is None:
        assert ending.fault is not None
    else:
        assert ending == Ending(expected)


@pytest.mark.parametrize("tail", [b"", DONE + DONE, DONE + b'data: {"error": 1}\n\n'])
def test_a_stream_needs_exactly_one_ending(tail: bytes) -> None:
    content = event(chunk(CHAT, [piece(CHAT, "a", finish="stop")])) + tail
    assert judged(200, "text/event-stream", content, 1).fault is not None

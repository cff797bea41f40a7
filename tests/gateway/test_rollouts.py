"""Weights that were changed live: after a restart, a reload, and in the other gateways."""

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from kvota.core.clock import SystemClock
from kvota.core.errors import ConfigError
from kvota.gateway.backends import Registry
from kvota.gateway.rollouts import RolloutBook, declared
from kvota.gateway.routes import Route, RouteBuilder, RouteTable
from kvota.gateway.settings import BackendEntry, GatewaySettings, ModelEntry, VersionEntry
from kvota.gateway.store.database import Database, StoreUnusable, open_database
from kvota.gateway.store.rollouts import (
    ROLLOUT_TABLES,
    RolloutStore,
    SavedRollout,
    StoredRollouts,
)
from kvota.telemetry.log import new_log
from tests.support.fake_backend import MODEL, FakeBackend, begins, streams
from tests.support.gateway_world import GatewayWorld, gateway_world, vllm_entry

PATIENCE_S = 60.0


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = open_database(database_url, ROLLOUT_TABLES)
    yield database
    database.close()


def entry(*versions: VersionEntry) -> ModelEntry:
    return ModelEntry(name="chat", versions=versions)


def one(name: str, weight: float, *, served_as: str = "m", backend: str = "a") -> VersionEntry:
    return VersionEntry(name=name, backends=(backend,), served_as=served_as, weight=weight)


FILE = entry(one("v1", 0.95), one("v2", 0.05))


class Gateway:
    """A gateway's book and its table, as if it had just started with this file."""

    def __init__(self, store: RolloutStore, file: ModelEntry = FILE) -> None:
        self._text = io.StringIO()
        self._log = new_log(self._text)
        self.book = RolloutBook(store, self._log)
        self.book.read()
        self.table = RouteTable()
        self._registry = Registry(SystemClock(), Random(1), self._log)
        self.reload(file)

    @property
    def route(self) -> Route:
        return self.table.routes["chat"]

    @property
    def weights(self) -> dict[str, float]:
        return {one.name: one.weight for one in self.route.rollout.versions}

    @property
    def log(self) -> str:
        return self._text.getvalue()

    def reload(self, file: ModelEntry, **settings: Any) -> None:
        entries = [BackendEntry(name=name, url="http://127.0.0.1:9") for name in "abc"]
        backends = self._registry.build(entries, environment={})
        builder = RouteBuilder(GatewaySettings(**settings), Random(1))
        self.table = builder.build([file], backends, self.table)
        self._registry.adopt(backends)
        self.book.take_in(self.table)

    async def roll_back(self, version: str, why: str = "worse") -> None:
        self.route.rollout.roll_back(version, why)
        assert await self.book.keep(self.route)

    async def weigh(self, **weights: float) -> None:
        await self.book.catch_up(self.table)
        self.route.rollout.set_weights(weights)
        assert await self.book.keep(self.route)


@pytest.fixture
def store(database: Database) -> RolloutStore:
    return RolloutStore(database)


async def test_weights_outlive_the_gateway(store: RolloutStore) -> None:
    await Gateway(store).weigh(v1=0.5, v2=0.5)
    again = Gateway(store)
    assert again.weights == {"v1": 0.5, "v2": 0.5}
    assert "rollout resumed" in again.log


async def test_a_promotion_outlives_the_gateway(store: RolloutStore) -> None:
    before = Gateway(store)
    before.route.rollout.promote("v2")
    await before.book.keep(before.route)
    again = Gateway(store)
    assert again.route.rollout.stable == "v2"
    with pytest.raises(ConfigError, match="stable"):
        again.route.rollout.roll_back("v2", "")


async def test_a_version_that_was_rolled_back_stays_so_with_the_reason(store: RolloutStore) -> None:
    await Gateway(store).roll_back("v2", "it was worse")
    again = Gateway(store)
    assert again.weights == {"v1": 0.95, "v2": 0.0}
    assert again.route.rollout.rolled_back == {"v2": "it was worse"}


async def test_other_weights_in_the_file_count_as_soon_as_it_is_read_again(
    store: RolloutStore,
) -> None:
    here = Gateway(store)
    router = here.route.versions["v2"].router
    here.reload(entry(one("v1", 0.4), one("v2", 0.6)))
    assert here.weights == {"v1": 0.4, "v2": 0.6}
    assert here.route.versions["v2"].router is router, "what it knows of its backends holds"
    await here.weigh(v1=0.1, v2=0.9)
    assert Gateway(store, entry(one("v1", 0.4), one("v2", 0.6))).weights == {"v1": 0.1, "v2": 0.9}


async def test_other_bounds_of_the_watch_count_and_change_no_weight(store: RolloutStore) -> None:
    here = Gateway(store)
    await here.weigh(v1=0.5, v2=0.5)
    before = here.route.rollout
    here.reload(FILE, rollback_failure_margin=0.5)
    assert here.route.rollout.settings.failure_margin == 0.5
    assert here.weights == {"v1": 0.5, "v2": 0.5}
    now = here.route.rollout
    here.reload(FILE, rollback_failure_margin=0.5)
    assert here.route.rollout is now is not before


async def test_where_nothing_was_changed_the_file_alone_counts(store: RolloutStore) -> None:
    Gateway(store)
    other = Gateway(store, entry(one("v1", 0.5), one("v2", 0.5)))
    assert other.weights == {"v1": 0.5, "v2": 0.5}
    assert other.log == ""


@pytest.mark.parametrize(
    "file",
    [
        entry(one("v1", 0.7), one("v2", 0.3)),
        entry(one("v1", 0.95), one("v2", 0.05, served_as="other")),
        entry(one("v1", 0.95), one("v3", 0.05)),
        entry(one("v2", 0.05), one("v1", 0.95)),
        entry(one("v1", 0.95)),
    ],
)
async def test_a_file_with_other_versions_wins_and_the_log_says_so(
    store: RolloutStore, file: ModelEntry
) -> None:
    await Gateway(store).weigh(v1=0.2, v2=0.8)
    changed = Gateway(store, file)
    assert changed.weights == {one.name: one.weight for one in file.versions}
    assert "the file has changed and wins" in changed.log
    assert await changed.book.store_changes()
    back = Gateway(store)
    assert back.weights == {"v1": 0.95, "v2": 0.05}, "what the file has replaced is forgotten"


async def test_another_backend_for_a_version_changes_no_weight(store: RolloutStore) -> None:
    gateway = Gateway(store)
    await gateway.weigh(v1=0.5, v2=0.5)
    moved = entry(one("v1", 0.95), one("v2", 0.05, backend="c"))
    gateway.reload(moved)
    assert gateway.weights == {"v1": 0.5, "v2": 0.5}
    assert Gateway(store, moved).weights == {"v1": 0.5, "v2": 0.5}


async def test_a_rolled_back_version_stays_out_of_a_new_file_where_it_stands_as_before(
    store: RolloutStore,
) -> None:
    await Gateway(store).roll_back("v2")
    same = Gateway(store, entry(one("v1", 0.9), one("v2", 0.05), one("v3", 0.1)))
    assert same.weights == {"v1": 0.9, "v2": 0.0, "v3": 0.1}
    assert same.route.rollout.rolled_back == {"v2": "worse"}
    assert '"still_rolled_back": ["v2"]' in same.log
    new = Gateway(store, entry(one("v1", 0.9), one("v2", 0.06)))
    assert new.weights == {"v1": 0.9, "v2": 0.06}, "its own line was changed: it gets a chance"


async def test_what_one_gateway_changes_the_others_see(store: RolloutStore) -> None:
    here, there = Gateway(store), Gateway(store)
    await here.weigh(v1=0.5, v2=0.5)
    await there.book.catch_up(there.table)
    assert there.weights == {"v1": 0.5, "v2": 0.5}
    await there.roll_back("v2")
    await here.book.catch_up(here.table)
    assert here.weights == {"v1": 0.5, "v2": 0.0}


async def test_where_an_operator_deleted_the_row_what_is_stored_anew_is_seen(
    store: RolloutStore, database: Database
) -> None:
    here, there = Gateway(store), Gateway(store)
    for weight in (0.3, 0.4):
        await here.weigh(v1=weight)
    await there.book.catch_up(there.table)
    with database.transaction() as connection:
        connection.execute(ROLLOUT_TABLES.tables["rollouts"].delete())
    await Gateway(store).weigh(v1=0.7)  # its first revision
    await there.book.catch_up(there.table)
    assert there.weights["v1"] == 0.7
    await there.weigh(v1=0.8)
    await here.book.catch_up(here.table)
    assert here.weights["v1"] == 0.8


async def test_a_gateway_with_another_file_is_left_alone(store: RolloutStore) -> None:
    here, there = Gateway(store), Gateway(store, entry(one("v1", 1.0), one("v2", 1.0)))
    await here.weigh(v1=0.5)
    await there.book.catch_up(there.table)
    assert there.weights == {"v1": 1.0, "v2": 1.0}


async def test_a_rollback_is_not_undone_by_who_did_not_see_it(store: RolloutStore) -> None:
    here, there = Gateway(store), Gateway(store)
    await here.roll_back("v2")
    there.route.rollout.set_weights({"v1": 0.4})  # it has not caught up
    assert await there.book.keep(there.route)
    assert there.weights["v2"] == 0.0
    assert Gateway(store).weights["v2"] == 0.0


async def test_two_rollbacks_at_once_both_count(store: RolloutStore) -> None:
    file = entry(one("v1", 0.8), one("v2", 0.1), one("v3", 0.1))
    here, there = Gateway(store, file), Gateway(store, file)
    await here.roll_back("v2")
    await there.roll_back("v3")
    assert Gateway(store, file).weights == {"v1": 0.8, "v2": 0.0, "v3": 0.0}


async def test_a_version_given_a_weight_again_is_not_taken_out_by_an_older_rollback(
    store: RolloutStore,
) -> None:
    file = entry(one("v1", 0.8), one("v2", 0.1), one("v3", 0.1))
    here, there = Gateway(store, file), Gateway(store, file)
    await here.roll_back("v2")
    await there.book.catch_up(there.table)
    await here.weigh(v2=0.3)
    await there.roll_back("v3")  # still thinking that v2 is out
    assert Gateway(store, file).weights == {"v1": 0.8, "v2": 0.3, "v3": 0.0}


class Broken(RolloutStore):
    """A store that is away as long as it is told to be."""

    is_away = False

    def all(self) -> StoredRollouts:
        self._answer()
        return super().all()

    def save(self, row: SavedRollout) -> SavedRollout | None:
        self._answer()
        return super().save(row)

    def _answer(self) -> None:
        if self.is_away:
            raise StoreUnusable("it is away")


@asynccontextmanager
async def watched(gateway: Gateway) -> AsyncIterator[None]:
    task = asyncio.create_task(gateway.book.watch(lambda: gateway.table, every_s=0.01))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - another thread does it
            await asyncio.sleep(0.01)


async def test_a_change_counts_while_the_database_is_away_and_is_kept_afterwards(
    database: Database,
) -> None:
    store = Broken(database)
    gateway = Gateway(store)
    store.is_away = True
    gateway.route.rollout.roll_back("v2", "worse")
    assert not await gateway.book.keep(gateway.route)
    assert "rollout is not kept" in gateway.log
    gateway.reload(entry(one("v1", 0.95), one("v2", 0.05, backend="b")))
    assert gateway.weights["v2"] == 0.0, "also in a table that is built meanwhile"
    async with watched(gateway):
        store.is_away = False
        await until(lambda: bool(store.all().rows))
    assert Gateway(store).weights["v2"] == 0.0


async def test_what_is_noted_is_stored_and_what_others_change_is_seen(store: RolloutStore) -> None:
    here, there = Gateway(store), Gateway(store)
    async with watched(here), watched(there):
        here.route.rollout.roll_back("v2", "worse")
        here.book.note(here.route)
        await until(lambda: there.weights["v2"] == 0.0)


async def test_a_state_that_cannot_be_is_told_and_passed_over(store: RolloutStore) -> None:
    route = Gateway(store).route
    state = route.rollout.state
    impossible = SavedRollout(
        model="chat", revision=1, declared=declared(route),
        state=type(state)(stable="v1", weights={"v1": 0.0, "v2": 0.0}, rolled_back={}),
    )  # fmt: skip
    store.save(impossible)
    again = Gateway(store)
    assert again.weights == {"v1": 0.95, "v2": 0.05}
    assert "rollout cannot be resumed" in again.log


async def test_a_row_that_cannot_be_read_hides_no_other(
    store: RolloutStore, database: Database
) -> None:
    route = Gateway(store).route
    there = SavedRollout(
        model="broken", revision=1, declared=declared(route), state=route.rollout.state
    )
    store.save(there)
    with database.transaction() as connection:
        connection.execute(sa.text("UPDATE rollouts SET state = 'nonsense'"))
    here, other = Gateway(store), Gateway(store)
    await here.weigh(v1=0.5, v2=0.5)
    for _ in range(3):
        await other.book.catch_up(other.table)
    assert other.weights == {"v1": 0.5, "v2": 0.5}
    assert Gateway(store).weights == {"v1": 0.5, "v2": 0.5}
    assert other.log.count("rollout cannot be read") == 1
    assert "Delete its row" in other.log


# --- the whole gateway, twice


@pytest.fixture
async def backends() -> AsyncIterator[tuple[FakeBackend, FakeBackend]]:
    async with AsyncExitStack() as closing:
        yield (
            await closing.enter_async_context(FakeBackend()),
            await closing.enter_async_context(FakeBackend()),
        )


@asynccontextmanager
async def started(
    backends: tuple[FakeBackend, FakeBackend], folder: Path, *, new: float = 0.5
) -> AsyncIterator[GatewayWorld]:
    a, b = backends
    versions = (one("v1", 1 - new, served_as=MODEL), one("v2", new, served_as=MODEL, backend="b"))
    async with gateway_world(
        vllm_entry("a", a), vllm_entry("b", b),
        models=[entry(*versions)], state_dir=str(folder), retry_budget=1.0,
    ) as world:  # fmt: skip
        yield world


async def shown(world: GatewayWorld) -> dict[str, float]:
    versions = (await world.get("/admin/rollouts")).json["data"][0]["versions"]
    return {one["name"]: one["weight"] for one in versions}


async def test_an_operators_change_is_kept_before_it_is_answered(
    backends: tuple[FakeBackend, FakeBackend], tmp_path: Path
) -> None:
    async with started(backends, tmp_path) as world:
        reply = await world.post("/admin/rollouts/chat", {"weights": {"v1": 0.25, "v2": 0.75}})
        assert reply.json["kept"] is True
    async with started(backends, tmp_path) as world:
        assert await shown(world) == {"v1": 0.25, "v2": 0.75}
    async with started(backends, tmp_path, new=0.125) as world:
        assert await shown(world) == {"v1": 0.875, "v2": 0.125}
        assert "the file has changed and wins" in world.log


async def test_late_calls_of_replaced_versions_roll_nothing_back(
    backends: tuple[FakeBackend, FakeBackend], tmp_path: Path
) -> None:
    async with started(backends, tmp_path) as world:
        old = world.parts.live.now.table.routes["chat"]
        [model] = world.fleet.models
        new = one("v1", 0.75, served_as=MODEL), one("v2", 0.25, served_as=MODEL, backend="b")
        world.fleet = replace(world.fleet, models=(replace(model, versions=new),))
        await world.parts.reload()
        verdicts = [old.rollout.observe(v, v == "v1", 0.1, 1.0) for v in ("v1", "v2") * 30]
        [verdict] = [each for each in verdicts if each.rolls_back]
        world.parts._rolled_back("chat", verdict)
        assert "rolled back" not in world.log
        assert await shown(world) == {"v1": 0.75, "v2": 0.25}


async def test_an_automatic_rollback_survives_a_restart(
    backends: tuple[FakeBackend, FakeBackend], tmp_path: Path
) -> None:
    cut, good = begins(3, lambda wire: wire.drop()), streams()
    backends[1].scripts.extend([cut, good, good] * 300)
    async with started(backends, tmp_path) as world:
        for _ in itertools.repeat(None, 600):
            await world.chat(stream=True)
            if "rolled back" in world.log:
                break
        assert (await shown(world))["v2"] == 0.0
    async with started(backends, tmp_path) as world:
        versions = (await world.get("/admin/rollouts")).json["data"][0]["versions"]
        assert versions[1]["weight"] == 0.0
        assert "failed in" in versions[1]["rolled_back"]
        for _ in range(10):
            assert (await world.chat()).headers["x-kvota-backend"] == "a"

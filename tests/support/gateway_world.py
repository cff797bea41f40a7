"""A gateway, fake backends and a client on one event loop, over real sockets.

async with gateway_world(models=[…], vllm={"a": backend}) as world:
    reply = await world.chat("hi", key=await world.key(tenant="team-a"))
"""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from kvota.core.clock import Clock, SystemClock
from kvota.core.errors import ConfigError
from kvota.edge.listening import bind, http_server, listen
from kvota.edge.settings import EdgeSettings
from kvota.gateway.assembly import Gateway
from kvota.gateway.plan import ServePlan
from kvota.gateway.settings import BackendEntry, Fleet, GatewaySettings, ModelEntry
from kvota.gateway.store.database import open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, NewKey
from kvota.gateway.stores import open_stores
from kvota.gateway.upstream.kinds import BackendKind
from kvota.telemetry.log import new_log
from tests.support.fake_backend import MODEL, FakeBackend
from tests.support.http_client import CHAT, Reply

NOW_UNIX = 1_000.0
PATIENCE_S = 60.0


class GatewayWorld:
    """Made by `gateway_world`. `settings` and `fleet` may be changed before a reload."""

    def __init__(self, folder: Path, settings: GatewaySettings, fleet: Fleet, clock: Clock) -> None:
        self._folder = folder
        self._log = io.StringIO()
        self.settings = settings
        self.fleet = fleet
        self.broken: str | None = None  # what is wrong with the settings, if they are read again
        self.clock = clock
        self.port = 0
        self._closing = ExitStack()
        self.gateway: Gateway | None = None
        self.http = httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)

    @property
    def log(self) -> str:
        return self._log.getvalue()

    @property
    def parts(self) -> Gateway:
        assert self.gateway is not None
        return self.gateway

    async def key(self, **fields: Any) -> str:
        """A new API key, known to the gateway. `fields` are those of NewKey."""
        database = open_database(sqlite_url(self._folder / "kvota.db"), KEY_TABLES)
        record, key = KeyStore(database).create(NewKey(**{"tenant": "t", **fields}), NOW_UNIX)
        database.close()
        self.parts.door.refresh()
        assert record.caller.key_id in key
        return key

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        return Reply(await self.http.post(path, json=body, headers=named))

    async def get(self, path: str, key: str | None = None) -> Reply:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return Reply(await self.http.get(path, headers=headers))

    async def chat(
        self, text: str = "hi", /, *, model: str = "chat", key: str | None = None,
        headers: Mapping[str, str] | None = None, **fields: Any,
    ) -> Reply:  # fmt: skip
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        return await self.post(CHAT, body, key, **(headers or {}))

    async def metrics(self, name: str) -> float:
        """The sum of all samples of this name and these labels: `name{label="x"` is a prefix."""
        page = (await self.get("/metrics")).content.decode()
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def read(self) -> tuple[GatewaySettings, Fleet]:
        if self.broken is not None:
            raise ConfigError(self.broken)
        return self.settings, self.fleet

    @asynccontextmanager
    async def serving(self, edge: EdgeSettings) -> AsyncIterator[None]:
        log = new_log(self._log)
        with self._closing, bind("127.0.0.1", 0) as taken:
            stores = open_stores(self.settings, "127.0.0.1", {}, self.clock, log, self._closing)
            plan = ServePlan(
                host="127.0.0.1", port=0, drain_timeout_s=5.0, edge=edge,
                gateway=self.settings, fleet=self.fleet, read=self.read, environment={},
            )  # fmt: skip
            self.gateway = gateway = Gateway(
                plan, stores, self.clock, log, Random(3), self._closing
            )
            await gateway.discover()
            listen(taken)
            self.port = taken.getsockname()[1]
            self.http.base_url = f"http://127.0.0.1:{self.port}"
            server = http_server(gateway.app)
            serving = asyncio.create_task(server.serve(sockets=[taken]))
            chores = [asyncio.create_task(chore) for chore in gateway.chores()]
            try:
                yield
            finally:
                await self.http.aclose()
                server.should_exit = True
                await serving
                for chore in chores:
                    chore.cancel()
                await asyncio.gather(*chores, return_exceptions=True)
                await gateway.close()


def vllm_entry(name: str, backend: FakeBackend, **fields: Any) -> BackendEntry:
    return BackendEntry(name=name, url=backend.url, kind=BackendKind.VLLM, **fields)


def model_of(name: str, *backends: str, **fields: Any) -> ModelEntry:
    return ModelEntry(name=name, backends=backends, served_as=MODEL, **fields)


@asynccontextmanager
async def gateway_world(
    *entries: BackendEntry,
    models: Sequence[ModelEntry] = (),
    edge: EdgeSettings | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayWorld]:
    """`settings` are those of `[gateway]`. On a clock of the test's own no open time ends."""
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(TemporaryDirectory(prefix="kvota-world-"))
        given = {"state_dir": folder, "probe_every_s": 0.1, **settings}
        world = GatewayWorld(
            Path(folder),
            GatewaySettings(**given),
            Fleet(backends=entries, models=tuple(models)),
            clock or SystemClock(),
        )
        await closing.enter_async_context(world.serving(edge or EdgeSettings()))
        yield world

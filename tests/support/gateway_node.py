"""A node behind a gateway: to a test of the contract, the same thing as a node.

    test ─HTTP─▶ gateway (thread, real port) ─unix socket─▶ LiveNode (thread, a stage for a model)

Everything of the gateway is what `kvota serve` runs but the supervisor: door, limits, filters,
usage, routing, the passage, the record.
"""

import asyncio
import io
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
import uvloop

from kvota.core.clock import SystemClock
from kvota.edge.listening import bind, http_server
from kvota.edge.settings import EdgeSettings
from kvota.gateway.assembly import Gateway
from kvota.gateway.plan import ServePlan
from kvota.gateway.settings import BackendEntry, Fleet, GatewaySettings, ModelEntry
from kvota.gateway.stores import open_stores
from kvota.gateway.upstream.kinds import BackendKind
from kvota.telemetry.log import new_log
from tests.support.live_node import PATIENCE_S, LiveNode, until
from tests.support.stage import Stage


class LiveGateway:
    """A gateway on a real port, in a thread of its own. `stop` it."""

    def __init__(
        self,
        *backends: BackendEntry,
        models: tuple[ModelEntry, ...] = (),
        edge: EdgeSettings | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of `[gateway]`."""
        self._closing = ExitStack()
        folder = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="kvota-gw-"))
        self._log = io.StringIO()
        self.settings = GatewaySettings(**{"state_dir": folder, "probe_every_s": 0.2, **settings})
        self.fleet = Fleet(backends=backends, models=models)
        self._edge = edge or EdgeSettings()
        self._taken = bind("127.0.0.1", 0)
        self.port: int = self._taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._parts: Gateway | None = None
        self._thread = threading.Thread(target=self._run, name="live-gateway", daemon=True)
        self._thread.start()
        until(self._has_started, "the gateway to listen")

    @property
    def log(self) -> str:
        return self._log.getvalue()

    @property
    def parts(self) -> Gateway:
        assert self._parts is not None
        return self._parts

    def on_loop(self, call: Any) -> Any:
        """Call on the gateway's event loop and wait for the result."""

        async def called() -> Any:
            return call()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE_S)

    def num_tasks(self) -> int:
        """Tasks on the gateway's loop, less the one that counts them and those that always run."""
        return len(self.on_loop(asyncio.all_tasks)) - 1 - len(self._chores)

    @property
    def connections(self) -> list[Any]:
        assert self._server is not None
        return list(self.on_loop(lambda: list(self._server.server_state.connections)))

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._exit)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the gateway does not end"
        self._closing.close()

    def _exit(self) -> None:
        assert self._server is not None
        self._server.should_exit = True

    def _has_started(self) -> bool:
        assert self._thread.is_alive(), "the gateway did not start"
        return self._server is not None and self._server.started

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        clock, log = SystemClock(), new_log(self._log)
        stores = open_stores(self.settings, "127.0.0.1", {}, clock, log, self._closing)
        plan = ServePlan(
            host="127.0.0.1", port=self.port, drain_timeout_s=5.0, edge=self._edge,
            gateway=self.settings, fleet=self.fleet,
            read=lambda: (self.settings, self.fleet), environment=os.environ,
        )  # fmt: skip
        self._parts = gateway = Gateway(plan, stores, clock, log, Random(3), self._closing)
        await gateway.discover()
        self._server = http_server(gateway.app)
        self._chores = [asyncio.create_task(chore) for chore in gateway.chores()]
        await self._server.serve(sockets=[self._taken])
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await gateway.close()


class GatewayNode(LiveNode):
    """A LiveNode whose clients go through a gateway. `settings` are the node's."""

    logs_requests = False

    def __init__(self, stage: Stage | None = None, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvota-node-")
        self._socket = Path(self._folder.name) / "node.sock"
        self._edge = EdgeSettings(
            **{
                name: value
                for name, value in settings.items()
                if name in EdgeSettings.__dataclass_fields__
            }
        )
        super().__init__(stage, unix_socket=str(self._socket), **settings)

    def _public_port(self) -> int:
        entry = BackendEntry(name="node", unix_socket=str(self._socket), kind=BackendKind.KVOTA)
        self.gateway = LiveGateway(entry, edge=self._edge)
        return self.gateway.port

    @property
    def log(self) -> str:
        return self.gateway.log + super().log

    @property
    def client_ports(self) -> set[int]:
        return {one.client[1] for one in self.gateway.connections if one.client}

    def num_tasks(self) -> int:
        return self.gateway.num_tasks() + super().num_tasks()

    def stop(self) -> None:
        self.stage.gate.open()
        self.gateway.stop()
        super().stop()
        self._folder.cleanup()


@contextmanager
def gateway_node(stage: Stage | None = None, **settings: Any) -> Iterator[GatewayNode]:
    node = GatewayNode(stage, **settings)
    try:
        yield node
    finally:
        node.stop()

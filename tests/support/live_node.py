"""A whole node on a real port, in a thread of this process, with a stage instead of a model.

Everything but the model is what `kvota serve` runs: the engine with its thread, the application,
uvicorn with our protocol, real sockets. The test controls each step through `node.stage`.
"""

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
import uvloop

from kvota.core.clock import Clock, SystemClock
from kvota.desk.ticket import Stage as TicketStage
from kvota.edge.listening import bind, bind_unix, http_server
from kvota.engine.text import Vocabulary
from kvota.model.grammar import GrammarCompiler
from kvota.model.template import ChatTemplate
from kvota.model.tokenizer import Tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from kvota.model.tool_format import ToolFormat
from kvota.node.options import DeskOptions, EngineSettings, ServerSettings
from kvota.node.serve import Node, build_node
from kvota.node.served import ServedModel
from kvota.node.tool_dialect import ToolDialect
from kvota.telemetry.log import new_log
from tests.support.http_client import Client
from tests.support.stage import Stage
from tests.support.tiny_models import CHAT_TEMPLATE
from tests.support.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_tokenizer

MODEL = "tiny"
LOAD_S = 40.0  # what a node's own process is said to have taken
PATIENCE_S = 60.0  # for what should be immediate, on a machine that is busy


def staged_model(
    *, template: str | None = CHAT_TEMPLATE, max_model_len: int = 1024, bos_id: int | None = None
) -> ServedModel:
    """The 300-token byte-level tokenizer with real grammars, tools and template."""
    core = tiny_tokenizer()
    parts = TokenizerParts(
        core=core,
        prefix=() if bos_id is None else (bos_id,),
        bos_id=bos_id,
        eos_id=IM_END_ID,
        eos_ids=frozenset({IM_END_ID}),
    )
    tokenizer = Tokenizer(parts)
    grammar = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [IM_END_ID])
    return ServedModel(
        name=MODEL,
        created=1_700_000_000,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        tokenizer=tokenizer,
        eos_ids=frozenset({IM_END_ID}),
        hidden_ids=tokenizer.special_ids,
        template=None
        if template is None
        else ChatTemplate(template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token),
        grammar=grammar,
        tooling=ToolDialect(ToolFormat.HERMES, tokenizer, grammar, Random(5)),
    )


class LiveNode(Client):
    """Running when made. `stop` it; an engine that died of a bug makes that fail."""

    logs_requests = True

    def __init__(
        self,
        stage: Stage | None = None,
        *,
        served: ServedModel | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are engine's or server's, by name."""
        self.stage = stage or Stage()
        self.served = served or staged_model()
        self._clock = clock or SystemClock()
        self._settings = settings
        self._log = io.StringIO()
        unix_socket = settings.get("unix_socket")
        self._taken = bind_unix(Path(unix_socket)) if unix_socket else bind("127.0.0.1", 0)
        self._begun = threading.Event()
        self._parts: Node | None = None
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="live-node", daemon=True)
        self._thread.start()
        assert self._begun.wait(PATIENCE_S)
        until(self._has_started, "the server to listen")
        self.port = self._public_port()
        super().__init__(f"http://127.0.0.1:{self.port}", MODEL)

    def _public_port(self) -> int:
        """Where clients connect, now that the node listens."""
        return int(self._taken.getsockname()[1])

    def _has_started(self) -> bool:
        return self._server is not None and self._server.started

    @property
    def log(self) -> str:
        """All lines logged so far."""
        return self._log.getvalue()

    @property
    def parts(self) -> Node:
        assert self._parts is not None
        return self._parts

    @property
    def num_blocks_used(self) -> int:
        return self.parts.engine.gauges.num_blocks_used

    @property
    def num_running(self) -> int:
        return self.parts.engine.gauges.num_running

    @property
    def num_open(self) -> int:
        """Choices accepted at the door and not ended."""
        return self.parts.runner.num_open

    @property
    def num_wanted(self) -> int:
        """Requests that are open and have not been told to end."""
        runner = self.parts.runner

        def count() -> int:
            return sum(
                runner._desk.stage(name) is not TicketStage.CLOSING for name in runner._streams
            )

        return int(self.on_loop(count))

    def drain(self) -> None:
        """What the first SIGTERM does."""
        self.on_loop(lambda: self.parts.runner.drain())

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Call on the server's event loop and wait for the result."""

        async def called() -> Any:
            return call()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE_S)

    @property
    def client_ports(self) -> set[int]:
        """The far ends of the connections that the server holds open."""
        return set(self.on_loop(self._client_ports))

    def _client_ports(self) -> list[int]:
        assert self._server is not None
        connections: Iterable[Any] = self._server.server_state.connections
        return [connection.client[1] for connection in connections if connection.client]

    def take_little(self, num_bytes: int = 4096) -> None:
        """Let the kernel hold few bytes for clients that do not read, of connections to come.

        Left alone it takes megabytes in before anybody is kept waiting.
        """
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def num_tasks(self) -> int:
        """Tasks on the server's loop, less the one that counts them."""
        return len(self.on_loop(asyncio.all_tasks)) - 1

    def wait_idle(self) -> None:
        """Return when nothing runs or waits and no block is held."""
        until(lambda: self.num_open == 0 and self._is_clean(), "the node to be idle")

    def _is_clean(self) -> bool:
        now = self.parts.engine.gauges
        blocks_add_up = now.num_blocks_free + now.num_blocks_cached == now.num_blocks
        is_empty = now.num_running == now.num_waiting == now.num_blocks_used == 0
        return is_empty and blocks_add_up and now.num_blocks_held_after_abort == 0

    def stop(self) -> None:
        """Cut what runs, close the port, end the thread."""
        self.stage.gate.open()
        self.close()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._exit)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not end"

    def _exit(self) -> None:
        assert self._server is not None
        self._server.should_exit = True

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        vocabulary = Vocabulary(self.served.tokenizer.pieces, self.served.hidden_ids)
        self._parts = node = build_node(
            self.served,
            self.stage,
            vocabulary,
            _chosen(EngineSettings, self._settings),
            _chosen(DeskOptions, self._settings),
            _chosen(ServerSettings, self._settings),
            clock=self._clock,
            log=new_log(self._log),
            log_requests=self.logs_requests,
            load_s=LOAD_S,
        )
        self._server = http_server(node.app)
        node.runner.start(node.engine)
        serving = asyncio.create_task(self._server.serve(sockets=[self._taken]))
        self._begun.set()
        await serving
        await node.runner.stop()


@contextmanager
def live_node(stage: Stage | None = None, **settings: Any) -> Iterator[LiveNode]:
    node = LiveNode(stage, **settings)
    try:
        yield node
    finally:
        node.stop()


def until(met: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for a state that must come by itself."""
    end_s = time.monotonic() + patience_s
    while not met():
        assert time.monotonic() < end_s, f"waited {patience_s:g} s for {what}"
        time.sleep(0.005)


def _chosen(kind: type[Any], settings: dict[str, Any]) -> Any:
    names = set(kind.__struct_fields__)
    structs = (EngineSettings, DeskOptions, ServerSettings)
    unknown = set(settings) - {name for struct in structs for name in struct.__struct_fields__}
    assert not unknown, unknown
    return kind(**{name: value for name, value in settings.items() if name in names})

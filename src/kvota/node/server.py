"""Listening, and stopping in order.

first SIGTERM or Ctrl-C   new requests get 503 `draining`, running ones finish, then exit 0
drain_timeout_s later     what still runs is ended with an error event, then exit 0
second signal             the process ends at once
the engine dies           every stream ends with an error, then exit 1
the gateway dies          as the first signal, for a node that one has started
"""

import asyncio
import contextlib
import socket
from typing import Any

from kvota.edge.listening import http_server, stop_signals
from kvota.edge.supervision import watch_lifeline
from kvota.node.engine_thread import Steppable
from kvota.node.runner import EngineRunner

STOP_TIMEOUT_S = 5.0
EXIT_OK = 0
EXIT_ENGINE_DIED = 1


async def serve(
    app: Any,
    taken: socket.socket,
    runner: EngineRunner,
    engine: Steppable,
    *,
    drain_timeout_s: float,
    supervised: bool = False,
) -> int:
    """Run the engine and answer on `taken` until told to stop. Returns the exit status."""
    server = http_server(app)
    stop = stop_signals()
    if supervised:
        watch_lifeline(stop)
    runner.start(engine)
    listening = asyncio.create_task(server.serve(sockets=[taken]))
    crashed = asyncio.create_task(runner.wait_ended())
    told = asyncio.create_task(stop.wait())
    await asyncio.wait({crashed, told, listening}, return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        await _drain(runner, drain_timeout_s)
    server.should_exit = True
    await listening
    for task in (crashed, told):
        task.cancel()
    return EXIT_ENGINE_DIED if runner.has_crashed else EXIT_OK


async def _drain(runner: EngineRunner, drain_timeout_s: float) -> None:
    runner.drain()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.wait_drained(), drain_timeout_s)
    with contextlib.suppress(TimeoutError):  # a step that never ends must not keep the process
        await asyncio.wait_for(runner.stop(), STOP_TIMEOUT_S)

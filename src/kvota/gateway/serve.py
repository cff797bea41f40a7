"""The composition root of a gateway: reading it is reading how `kvota serve` is put together.

    bind ─▶ keys ─▶ settings ─▶ node (started, watched) ─▶ application ─▶ listen

    first SIGTERM or Ctrl-C   new requests get 503 `draining`, running ones finish, the node goes,
                              then exit 0
    drain_timeout_s later     what still runs ends with an error event
    second signal             the process ends at once, and the node with it
    SIGHUP                    the settings are read again

Whatever can be wrong is found before the last step, so a gateway that listens works.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from random import SystemRandom
from typing import Any, Final

import uvloop
from rich.console import Console

from kvota.core.clock import SystemClock
from kvota.edge.collector import spare_what_stays
from kvota.edge.listening import bind, http_server, listen, stop_signals
from kvota.edge.liveness import gone_after_s
from kvota.gateway.assembly import Gateway
from kvota.gateway.auth import refuse_open_door
from kvota.gateway.plan import ServePlan
from kvota.gateway.startup_text import show_address
from kvota.gateway.stores import open_stores
from kvota.gateway.supervisor import NeverServed
from kvota.telemetry.log import Log, new_log

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 1
EXIT_INTERRUPTED: Final = 130
CUT_GRACE_S: Final = 2.0  # for the error events of what was cut


def run(plan: ServePlan) -> int:
    """Serve until told to stop. Returns the exit status; raises StartupError before listening."""
    screen = Console(stderr=True, highlight=False)
    with ExitStack() as closing:
        taken = closing.enter_context(
            bind(plan.host, plan.port, gone_after_s=gone_after_s(plan.edge.send_timeout_s))
        )
        clock, log = SystemClock(), new_log(sys.stderr)
        stores = open_stores(
            plan.gateway, plan.host, plan.environment, clock, log, closing,
            trace_endpoint=plan.trace_endpoint,
        )  # fmt: skip
        refuse_open_door(plan.host, has_keys=stores.door.num_keys > 0)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            gateway = Gateway(plan, stores, clock, log, SystemRandom(), closing)
            return loop.run(_serve(plan, gateway, taken, screen, log))


async def _serve(
    plan: ServePlan, gateway: Gateway, taken: socket.socket, screen: Console, log: Log
) -> int:
    told = stop_signals()
    try:
        if not await _start(gateway, told):
            return EXIT_INTERRUPTED
    except NeverServed as failed:
        return _exit_status(failed, screen)
    gateway.node_is_up()
    await gateway.discover()
    server = http_server(gateway.app)
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    spare_what_stays()
    listen(taken)
    show_address(screen, *taken.getsockname()[:2], is_open=gateway.door.is_open)
    listening = asyncio.create_task(server.serve(sockets=[taken]))
    chores = [*gateway.chores(), _reload_on(hangup, gateway)]
    is_broken = await _until_told(told, listening, chores, log)
    await _drain(gateway, plan.drain_timeout_s)
    server.should_exit = True
    await listening
    await gateway.close()
    return EXIT_BROKEN if is_broken else EXIT_OK


async def _reload_on(hangup: asyncio.Event, gateway: Gateway) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        await gateway.reload_or_log()


async def _start(gateway: Gateway, told: asyncio.Event) -> bool:
    """Bring the node up. False when told to stop before it was. Raises NeverServed."""
    if gateway.own is None:
        return True
    starting = asyncio.create_task(gateway.own.supervisor.start())
    stopping = asyncio.create_task(told.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await gateway.own.supervisor.stop()
        return False
    await starting
    return True


async def _drain(gateway: Gateway, timeout_s: float) -> None:
    """Finish what runs, in order: the door, the node's own drain, foreign answers, the node."""
    gateway.begin_drain()
    leaving = asyncio.create_task(_leave(gateway, timeout_s))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s + CUT_GRACE_S * (gateway.own is not None)):
            await asyncio.shield(leaving)
    gateway.live.cut()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_GRACE_S):
            await gateway.live.wait_idle()
    if gateway.own is not None and not leaving.done():
        gateway.own.supervisor.kill()
    await leaving


async def _leave(gateway: Gateway, timeout_s: float) -> None:
    """Return when every answer is given and the engine is gone.

    Our node finishes what it has begun. Others may not: vLLM ends its requests when it is told to
    stop, so it is told when they are done, or their time is over.
    """
    own, idle = gateway.own, gateway.live.wait_idle
    if own is None:
        await idle()
    elif own.backend.is_own_kind:
        await asyncio.gather(idle(), own.supervisor.stop())
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await idle()
        await own.supervisor.stop()


def _exit_status(failed: NeverServed, screen: Console) -> int:
    """A node that refuses to start has said why; one that was killed could not."""
    if failed.status > 0:
        return failed.status
    screen.print(
        f"[bold]kvota cannot start.[/bold] The engine's process was ended by signal "
        f"{-failed.status} while it loaded. If that is 9, the machine ran out of memory; if 11, "
        "the model's files are most likely damaged: fetch them again.",
        soft_wrap=True,
    )
    return 1


async def _until_told(
    told: asyncio.Event,
    listening: asyncio.Task[None],
    chores: Sequence[Coroutine[Any, Any, None]],
    log: Log,
) -> bool:
    """Run the chores until told to stop. True when one of them died of a bug, which ends it all."""
    tasks = [asyncio.create_task(chore) for chore in chores]
    stopping = asyncio.create_task(told.wait())
    await asyncio.wait({stopping, listening, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    died = [task.exception() for task in tasks if task.done()]
    for task in (stopping, *tasks):
        task.cancel()
    await asyncio.gather(stopping, *tasks, return_exceptions=True)
    for bug in died:
        log.critical("a chore of the gateway died", exc_info=bug)
    return bool(died)

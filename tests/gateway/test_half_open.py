"""Connections where one side does nothing, little, or is no longer there: bounded, both sides.

Clients: nothing · half of the headers · half of the body, all at once or trickling.
Backends: not reachable · accepts and says nothing · vanishes in the middle of an answer.
"""

import asyncio
import functools
import socket
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvota.edge import connection
from kvota.edge.liveness import notice_vanished
from kvota.edge.settings import EdgeSettings
from kvota.edge.small_body import small_body
from kvota.gateway import admin
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream import pool
from kvota.gateway.upstream.kinds import BackendKind
from kvota.gateway.upstream.probing import BackendState
from tests.support.fake_backend import FakeBackend, Received, Wire, begins, never_answers
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry
from tests.support.vanishing import GONE_AFTER_S, on_linux, vanish

PATIENCE_S = 60.0
SHORT_S = 0.3
PATIENT: Any = {"first_byte_timeout_s": SHORT_S, "idle_timeout_s": SHORT_S}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
ADMIN = b"POST /admin/rollouts/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"


@pytest.fixture
async def world(
    closing: AsyncExitStack, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> GatewayWorld:
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(connection, "LINGER_S", SHORT_S)
    made = gateway_world(
        vllm_entry("a", backend, **PATIENT),
        models=[model_of("chat", "a")],
        edge=EdgeSettings(body_timeout_s=SHORT_S),
    )
    return await closing.enter_async_context(made)


async def answer_to(world: GatewayWorld, sent: bytes, *, trickle: bytes = b"") -> bytes:
    """What comes until the gateway closes; `trickle` is sent byte by byte all the while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(sent)
    trickling = asyncio.create_task(_trickle(writer, trickle))
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while piece := await reader.read(65536):
                answer += piece
    except ConnectionResetError:
        pass  # closed while something of ours was on its way
    finally:
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
        writer.close()
    return answer


async def _trickle(writer: asyncio.StreamWriter, content: bytes) -> None:
    for at in range(len(content)):
        writer.write(content[at : at + 1])
        await asyncio.sleep(SHORT_S / 20)


@pytest.mark.parametrize("sent", [b"", HEAD[:9], HEAD[:40]])
async def test_a_client_that_does_not_say_what_it_wants_is_left(
    world: GatewayWorld, sent: bytes
) -> None:
    assert await answer_to(world, sent) == b""


async def test_headers_that_trickle_in_do_not_keep_a_connection(world: GatewayWorld) -> None:
    endless = b"x-a: b\r\n" * 1000
    assert await answer_to(world, HEAD[:-2], trickle=endless) == b""


@pytest.mark.parametrize("trickle", [b"", b"x" * 900])
async def test_a_body_that_does_not_come_is_answered_and_its_connection_closed(
    world: GatewayWorld, trickle: bytes
) -> None:
    answer = await answer_to(world, HEAD + b'{"model"', trickle=trickle)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"The body did not arrive within 0.3 s." in answer
    assert world.parts.live.num_open == 0


async def test_a_body_that_nobody_waits_for_does_not_keep_its_connection(
    world: GatewayWorld,
) -> None:
    unknown = HEAD.replace(b"/v1/chat/completions", b"/nothing/here")
    answer = await answer_to(world, unknown + b"x", trickle=b"x" * 900)
    assert answer.startswith(b"HTTP/1.1 404 ")


async def test_a_body_that_comes_late_but_comes_leaves_the_connection_in_use(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(HEAD.replace(b"/v1/chat/completions", b"/nothing/here") + b"x" * 990)
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x" * 10 + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b'{"status":"ok"}' in await reader.read()
    writer.close()


@pytest.mark.parametrize("trickle", [b"", b"x" * 900])
async def test_an_operators_request_is_no_exception(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch, trickle: bytes
) -> None:
    hasty = functools.partial(small_body, bytes_max=500, timeout_s=SHORT_S)
    monkeypatch.setattr(admin, "small_body", hasty)
    answer = await answer_to(world, ADMIN, trickle=trickle)
    assert answer.startswith(b"HTTP/1.1 400 ")
    too_large = await answer_to(world, ADMIN + b"x" * 600)
    assert too_large.startswith(b"HTTP/1.1 413 ")
    await (await left(world, ADMIN)).wait_closed()
    assert "Traceback" not in world.log


async def left(world: GatewayWorld, sent: bytes) -> asyncio.StreamWriter:
    """A client that sends this, waits a moment and goes."""
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(sent)
    await writer.drain()
    await asyncio.sleep(SHORT_S / 3)
    writer.close()
    return writer


# --- backends


async def is_at_rest(world: GatewayWorld) -> bool:
    """Nothing is held for anybody."""
    async with asyncio.timeout(PATIENCE_S):
        await world.parts.live.wait_idle()
    desk = world.parts.registry["a"].desk
    assert desk is not None
    desk.check()
    return desk.snapshot().held_tokens == 0 and world.parts.registry["a"].num_open == 0


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_backend_that_accepts_and_never_answers(
    world: GatewayWorld, backend: FakeBackend, is_stream: bool
) -> None:
    backend.script = never_answers
    reply = await world.chat(stream=is_stream)
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert "did not answer within 0.3 s" in reply.error["message"]
    assert await is_at_rest(world)
    async with asyncio.timeout(PATIENCE_S):
        await backend.generations[0].is_gone.wait()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_backend_whose_program_takes_no_connection_from_its_kernel(
    closing: AsyncExitStack, is_stream: bool
) -> None:
    """It is connected to, and what is sent to it is acknowledged, and nobody reads it."""
    listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    entry = BackendEntry(name="a", url=url, kind=BackendKind.VLLM, **PATIENT)
    world = await closing.enter_async_context(
        gateway_world(entry, models=[model_of("chat", "a")], probe_every_s=3600.0)
    )
    world.parts.registry["a"].state = BackendState(is_healthy=True)
    reply = await world.chat(stream=is_stream)
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert await is_at_rest(world)


@on_linux
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_backend_that_vanishes_in_the_middle_of_an_answer(
    closing: AsyncExitStack, backend: FakeBackend, is_stream: bool
) -> None:
    entry = vllm_entry("a", backend, idle_timeout_s=1.0)
    made = gateway_world(entry, models=[model_of("chat", "a")])
    world = await closing.enter_async_context(made)

    async def vanishes(wire: Wire) -> None:
        vanish(wire._transport.get_extra_info("socket"))
        await wire.stall()

    backend.script = begins(4, vanishes)
    reply = await world.chat(stream=is_stream)
    error = reply.error if not is_stream else reply.chunks[-1]["error"]
    assert error["code"] == "backend_error"
    assert reply.status == (200 if is_stream else 502)
    assert await is_at_rest(world)
    assert await world.metrics('kvota_gateway_attempts_total{backend="a"') == 1
    backend.script = None
    assert (await world.chat()).status == 200, "a fresh connection is used"


@on_linux
async def test_a_backend_that_vanishes_while_it_reads_a_prompt_is_missed_before_its_time_is_over(
    closing: AsyncExitStack, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts may take minutes to read, so nobody but the kernel can tell."""
    hasty = functools.partial(notice_vanished, gone_after_s=GONE_AFTER_S)
    monkeypatch.setattr(pool, "notice_vanished", hasty)
    entry = vllm_entry("a", backend, first_byte_timeout_s=3600.0)
    made = gateway_world(entry, models=[model_of("chat", "a")])
    world = await closing.enter_async_context(made)

    async def vanishes(asked: Received, wire: Wire) -> None:
        vanish(wire._transport.get_extra_info("socket"))
        await wire.stall()

    backend.script = vanishes
    async with asyncio.timeout(PATIENCE_S):
        reply = await world.chat()
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert await is_at_rest(world)

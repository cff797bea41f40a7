"""One backend's connection: patient, bounded, and closed at once."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvota.core.clock import Clock, ManualClock, SystemClock
from kvota.core.errors import ConfigError, RequestTimeout
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind
from tests.support import fake_backend as fake
from tests.support.fake_backend import FakeBackend

CHAT = fake.GENERATING[0]
CLOCK = SystemClock()
PATIENCE_S = 60.0


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as backend:
        yield backend


def upstream_of(backend: FakeBackend, clock: Clock = CLOCK, **settings: Any) -> Upstream:
    return Upstream(UpstreamSettings(name="b", url=backend.url, **settings), clock)


async def failure(upstream: Upstream, **asked: Any) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as failed:
        async with upstream.open(CHAT, b"{}", **asked) as reply:
            await reply.body()
    await upstream.close()
    assert failed.value.backend == "b"
    assert "backend b" in failed.value.message
    return failed.value


async def test_only_its_own_credential_is_sent(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    upstream = upstream_of(backend, api_key="sk-backend")
    async with upstream.open(CHAT, b"{}", {"x-request-id": "r"}) as reply:
        await reply.body()
    await upstream.close()
    headers = dict(backend.received[0].headers)
    assert headers.pop("host").startswith("127.0.0.1:")
    assert headers == {
        "authorization": "Bearer sk-backend",
        "x-request-id": "r",
        "user-agent": "kvota",
        "accept": "application/json, text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": "2",
    }


@pytest.mark.parametrize("value", ["a\r\nx-other: b", "a\nx-other: b", "a\rx-other: b"])
async def test_a_header_cannot_become_two(backend: FakeBackend, value: str) -> None:
    upstream = upstream_of(backend)
    with pytest.raises(ValueError, match="line break"):
        async with upstream.open(CHAT, b"{}", {"x-request-id": value}):
            pass
    await upstream.close()
    assert backend.received == []


@pytest.mark.parametrize(
    ("url", "sent"), [("me:p%40ss@", "Basic bWU6cEBzcw=="), ("", None)]
)  # fmt: skip
async def test_a_credential_in_the_url(backend: FakeBackend, url: str, sent: str | None) -> None:
    host = backend.url.removeprefix("http://")
    upstream = Upstream(UpstreamSettings(name="b", url=f"http://{url}{host}"), CLOCK)
    async with upstream.open(CHAT, b"{}") as reply:
        await reply.body()
    await upstream.close()
    assert backend.received[0].headers.get("authorization") == sent
    assert backend.received[0].headers["host"] == host


def test_a_key_is_not_shown() -> None:
    assert "sk-" not in repr(UpstreamSettings(name="b", url="http://x", api_key="sk-secret"))


async def test_nobody_there() -> None:
    upstream = Upstream(UpstreamSettings(name="b", url="http://127.0.0.1:1"), CLOCK)
    said = await failure(upstream)
    assert said.kind_of_failure is FailureKind.CONNECT
    assert said.before_first_byte


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "node.sock")
    async with FakeBackend(unix_socket=path) as backend:
        upstream = upstream_of(backend, unix_socket=path)
        assert b"fake-model" in await upstream.fetch("/v1/models", timeout_s=PATIENCE_S)
        await upstream.close()
    gone = Upstream(UpstreamSettings(name="b", url="http://localhost", unix_socket=path), CLOCK)
    assert (await failure(gone)).kind_of_failure is FailureKind.CONNECT


async def test_a_path_before_the_api(backend: FakeBackend) -> None:
    settings = UpstreamSettings(name="b", url=f"{backend.url}/proxy/")
    upstream = Upstream(settings, CLOCK)
    with pytest.raises(AttemptFailed):
        await upstream.fetch("/health", timeout_s=PATIENCE_S)
    await upstream.close()
    assert backend.received[0].path == "/proxy/health"


async def test_redirects_are_not_followed(backend: FakeBackend) -> None:
    backend.script = fake.fails(307, headers={"location": f"{backend.url}/v1/models"})
    said = await failure(upstream_of(backend))
    assert said.backend_status == 307
    assert len(backend.received) == 1


async def test_a_status_that_does_not_come(backend: FakeBackend) -> None:
    backend.script = fake.never_answers
    said = await failure(upstream_of(backend, first_byte_timeout_s=0.5))
    assert said.kind_of_failure is FailureKind.FIRST_BYTE_TIMEOUT
    await asyncio.wait_for(backend.received[0].is_gone.wait(), PATIENCE_S)


async def test_headers_that_dawdle(backend: FakeBackend) -> None:
    async def dawdle(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\n")
        while not wire.is_gone.is_set():
            await wire.raw(b"x-pad: 1\r\n")
            await wire.pause(0.02)

    backend.script = dawdle
    said = await failure(upstream_of(backend, first_byte_timeout_s=0.5))
    assert said.kind_of_failure in (FailureKind.FIRST_BYTE_TIMEOUT, FailureKind.MALFORMED)
    await asyncio.wait_for(backend.received[0].is_gone.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    "content", [b"hello\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10**5]
)
async def test_what_is_not_http(backend: FakeBackend, content: bytes) -> None:
    async def garbage(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.raw(content)
        await wire.stall()

    backend.script = garbage
    said = await failure(upstream_of(backend))
    assert said.kind_of_failure in (FailureKind.MALFORMED, FailureKind.CUT)


async def test_an_answer_that_was_compressed_unasked(backend: FakeBackend) -> None:
    async def zipped(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.head(length=4, headers={"content-encoding": "gzip"})
        await wire.raw(b"\x1f\x8b00")

    backend.script = zipped
    assert (await failure(upstream_of(backend))).kind_of_failure is FailureKind.MALFORMED


async def test_a_body_over_the_limit(backend: FakeBackend) -> None:
    backend.script = fake.says(b"x" * 600, b"y" * 600)
    said = await failure(upstream_of(backend, body_bytes_max=1000))
    assert said.kind_of_failure is FailureKind.TOO_LARGE


async def test_an_error_body_without_an_end(backend: FakeBackend) -> None:
    async def endless(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.head(500)
        while not wire.is_gone.is_set():
            await wire.send(b"x" * 1000)
            await asyncio.sleep(0)

    backend.script = endless
    said = await failure(upstream_of(backend))
    assert said.backend_status == 500
    assert len(said.message) < 3000


async def test_the_deadline_is_the_requests_own_failure(backend: FakeBackend) -> None:
    upstream = upstream_of(backend)
    for script in (fake.never_answers, fake.begins(3, fake.Wire.stall)):
        backend.script = script
        with pytest.raises(RequestTimeout):
            async with upstream.open(CHAT, b"{}", deadline_s=CLOCK.now() + 0.1) as reply:
                await reply.body()
    with pytest.raises(RequestTimeout):
        async with upstream.open(CHAT, b"{}", deadline_s=CLOCK.now() - 1.0):
            pass
    await upstream.close()


async def test_leaving_early_closes_and_reading_to_the_end_keeps(backend: FakeBackend) -> None:
    upstream = upstream_of(backend)
    for _ in range(3):
        async with upstream.open(CHAT, b'{"stream": true}') as reply:
            await reply.body()
    assert backend.num_connections == 1
    backend.script = fake.never_ends
    async with upstream.open(CHAT, b"{}") as reply:
        await reply.read()
    await asyncio.wait_for(backend.received[-1].is_gone.wait(), PATIENCE_S)
    await upstream.close()


async def test_a_kept_connection_that_is_just_being_closed_is_no_failure(
    backend: FakeBackend,
) -> None:
    upstream = upstream_of(backend, ManualClock())  # "at once" takes no time

    async def once(asked: fake.Received, wire: fake.Wire) -> None:
        await (fake.streams(3)(asked, wire) if asked.number == 1 else fake.hangs_up(asked, wire))

    backend.script = once
    for _ in range(4):
        async with upstream.open(CHAT, b"{}") as reply:
            assert (await reply.body()).endswith(fake.DONE)
    await upstream.close()


async def test_when_all_kept_connections_are_stale_a_new_one_is_tried_at_once() -> None:
    num_heads, together = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes a second request, and closes."""
        nonlocal num_heads
        await reader.readuntil(b"{}")
        num_heads += 1
        if num_heads == 5:
            together.set()
        await together.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream = Upstream(UpstreamSettings(name="b", url=url), ManualClock())

    async def ask() -> bytes:
        async with upstream.open(CHAT, b"{}") as reply:
            return await reply.body()

    assert await asyncio.gather(*(ask() for _ in range(5))) == [b"ok"] * 5
    assert await ask() == b"ok"
    assert num_heads == 6
    await upstream.close()
    server.close()


async def test_a_kept_connection_that_is_cut_in_a_head_is_a_failure(backend: FakeBackend) -> None:
    upstream = upstream_of(backend)
    async with upstream.open(CHAT, b"{}") as reply:
        await reply.body()

    async def begins(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
        await fake.hangs_up(asked, wire)

    backend.script = begins
    assert (await failure(upstream)).kind_of_failure is FailureKind.CUT
    assert len(backend.received) == 2


async def test_a_new_connection_that_is_cut_is_a_failure_at_once(backend: FakeBackend) -> None:
    backend.script = fake.hangs_up
    said = await failure(upstream_of(backend))
    assert said.kind_of_failure is FailureKind.CUT
    assert len(backend.received) == 1


async def test_a_kept_connection_that_is_cut_late_is_a_failure(backend: FakeBackend) -> None:
    class LaterClock:
        """A second passes with each look."""

        now_s = 0.0

        def now(self) -> float:
            self.now_s += 1.0
            return self.now_s

    upstream = Upstream(UpstreamSettings(name="b", url=backend.url), LaterClock())
    async with upstream.open(CHAT, b"{}") as reply:
        await reply.body()
    backend.script = fake.hangs_up
    assert (await failure(upstream)).kind_of_failure is FailureKind.CUT
    assert len(backend.received) == 2


async def test_a_reader_is_woken_when_the_answer_is_closed(backend: FakeBackend) -> None:
    backend.script = fake.begins(1, fake.Wire.stall)
    upstream = upstream_of(backend)
    async with upstream.open(CHAT, b"{}") as reply:
        await reply.read()
        waiting = asyncio.create_task(reply.read())
        await asyncio.sleep(0)
        reply.close()
        with pytest.raises(AttemptFailed):
            await asyncio.wait_for(waiting, PATIENCE_S)
    await upstream.close()


async def test_no_more_connections_than_allowed(backend: FakeBackend) -> None:
    backend.script = fake.never_ends
    upstream = upstream_of(backend, connections_max=1, connect_timeout_s=0.5)
    async with upstream.open(CHAT, b"{}"):
        with pytest.raises(AttemptFailed) as failed:
            async with upstream.open(CHAT, b"{}"):
                pass
    assert failed.value.kind_of_failure is FailureKind.CONNECT
    await upstream.close()


async def test_a_closed_upstream_opens_nothing(backend: FakeBackend) -> None:
    upstream = upstream_of(backend)
    await upstream.close()
    assert (await failure(upstream)).kind_of_failure is FailureKind.CONNECT
    assert backend.received == []


async def test_a_small_question_has_its_own_time(backend: FakeBackend) -> None:
    backend.overrides["/health"] = fake.never_answers
    upstream = upstream_of(backend)
    with pytest.raises(AttemptFailed, match=r"did not answer /health within 0\.1 s"):
        await upstream.fetch("/health", timeout_s=0.1)
    await upstream.close()


@pytest.mark.parametrize(
    "wrong",
    [{"url": "ftp://x"}, {"url": "127.0.0.1:8000"}, {"idle_timeout_s": 0.0},
     {"connections_max": 0}],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="backend b"):
        UpstreamSettings(**{"name": "b", "url": "http://x", **wrong})


async def test_a_certificate_that_nobody_signed_is_refused(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    maker = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
        "/CN=localhost", "-keyout", str(key), "-out", str(certificate),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await maker.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    strict = Upstream(UpstreamSettings(name="b", url=url), CLOCK)
    assert (await failure(strict)).kind_of_failure is FailureKind.CONNECT
    trusting = Upstream(UpstreamSettings(name="b", url=url, verify_tls=False), CLOCK)
    assert await trusting.fetch("/", timeout_s=PATIENCE_S) == b"ok"
    await trusting.close()
    server.close()

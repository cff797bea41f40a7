"""Stopping `kvota serve`: streams end well, or are told; the exit status says how it went."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.http_client import CHAT, COMPLETIONS
from tests.support.live_node import live_node, until
from tests.support.raw_http import RawConnection, post_bytes
from tests.support.serve_process import ServeProcess, serve_process

LONG = {"prompt": "go on", "max_tokens": 10_000, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture
def mortal(long_model: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    """A process of the test's own, with the flags of its parameter."""
    flags: tuple[str, ...] = getattr(request, "param", ())
    with serve_process(long_model, "--kv-memory", "32MiB", *flags) as process:
        yield process


def test_a_stream_goes_on_to_its_end_after_the_first_signal(mortal: ServeProcess) -> None:
    """E03"""
    body = {**LONG, "max_tokens": 1500}
    with mortal.stream(COMPLETIONS, body) as stream, RawConnection(_port(mortal)) as raw:
        stream.next_text()
        mortal.signal()
        until(lambda: mortal.get("/ready").status == 503, "the drain to begin")
        assert mortal.get("/health").status == 200
        refused = mortal.chat("too late", stream=True)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 10, "the drain may take 30 s"
        raw.send(post_bytes(CHAT, mortal.chat_body()))
        assert b"503" in raw.read_all(), "the connection is closed after the refusal"
        events = stream.rest()
    assert events[-1] == "[DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert mortal.wait_exit() == 0
    assert "Traceback" not in mortal.errors


@pytest.mark.parametrize("mortal", [("--drain-timeout-s", "0.5")], indirect=True)
def test_what_outlasts_the_drain_ends_with_an_error(mortal: ServeProcess) -> None:
    """E03"""
    with mortal.stream(COMPLETIONS, LONG) as stream:
        stream.next_text()
        mortal.signal(signal.SIGINT)
        events = stream.rest()
    assert '"error"' in events[-1]
    assert "[DONE]" not in events
    assert mortal.wait_exit() == 0


def test_a_second_signal_ends_the_process_at_once(mortal: ServeProcess) -> None:
    """E03"""
    with mortal.stream(COMPLETIONS, LONG) as stream:
        stream.next_text()
        mortal.signal()
        until(lambda: mortal.get("/ready").status == 503, "the drain to begin")
        mortal.signal()
        assert mortal.wait_exit() == 130
        with pytest.raises(httpx.TransportError):
            stream.rest()


# Without the long limits the desk would refuse at the door who cannot begin in time.
@pytest.mark.parametrize(
    "mortal",
    [("--max-running-requests", "1", "--queue-timeout-s", "900", "--request-timeout-s", "900")],
    indirect=True,
)
def test_requests_in_line_are_told_that_the_server_goes(mortal: ServeProcess) -> None:
    """E03: queued requests get 503, not silence"""
    with (
        ThreadPoolExecutor() as pool,
        mortal.stream(COMPLETIONS, {**LONG, "max_tokens": 1500}) as stream,
    ):
        stream.next_text()
        queued = [pool.submit(mortal.chat, "wait", stream=bool(i)) for i in range(2)]
        until(lambda: mortal.metric("kvota_requests_waiting") == 2, "both to wait")
        mortal.signal()
        for future in queued:
            reply = future.result()
            assert (reply.status, reply.error["code"]) == (503, "draining")
        assert stream.rest()[-1] == "[DONE]"
    assert mortal.wait_exit() == 0


def test_an_idle_server_ends_at_the_first_signal(mortal: ServeProcess) -> None:
    """E03: a connection that is kept alive does not keep the process"""
    with RawConnection(_port(mortal)):
        assert mortal.chat(max_tokens=1).status == 200
        mortal.signal(signal.SIGINT)
        assert mortal.wait_exit() == 0


def test_a_drain_without_a_process_refuses_and_finishes() -> None:
    """E03, step by step"""
    with (
        live_node(max_running_requests=1) as node,
        ThreadPoolExecutor() as pool,
        node.stage.held() as gate,
    ):
        running = pool.submit(node.chat, max_tokens=5, stream=True)
        gate.wait_for_step()
        waiting = pool.submit(node.chat, max_tokens=5, stream=True)
        until(lambda: node.num_open == 2, "it to wait")
        node.drain()
        assert node.get("/ready").error["code"] == "draining"
        assert node.chat().error["code"] == "draining"
        gate.allow(2)
        assert waiting.result().error["code"] == "draining"
        gate.open()
        assert running.result().finish() == "length"


def test_a_port_in_use_or_a_missing_model_ends_the_start(
    process: ServeProcess, tmp_path: Path
) -> None:
    """An operator reads one message, not a traceback; the status is not 0."""
    for arguments in (
        (str(tmp_path / "nothing"), "--port", "0"),
        ("smollm2-135m-instruct", "--port", str(_port(process))),
    ):
        command = [sys.executable, "-m", "kvota", "serve", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2
        assert "cannot start" in ended.stderr
        assert "Traceback" not in ended.stderr


def _port(process: ServeProcess) -> int:
    return int(process.url.rpartition(":")[2])

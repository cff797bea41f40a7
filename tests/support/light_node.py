"""A node in a process of its own that is up in a moment: the supervision contract and no engine.

    python -m tests.support.light_node --unix-socket PATH [--behave exit-3|mute|stuck|slow-load]

It answers every chat with `max_tokens` chunks, 20 ms apart, and tells its pid in each of them.
`mute` stops answering, `stuck` says that it makes no progress, and both begin with the first
request that says so; `fat` then takes 100 MB; `POST /behave` is that request.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvota.edge.listening import bind_unix, http_server, listen, stop_signals
from kvota.edge.supervision import NodeReady, announce, watch_lifeline
from kvota.edge.trust import UsageReport

MODEL = "light"
CHUNK_EVERY_S = 0.02
FAT_BYTES = 100_000_000
MUTE_AFTER_S = 0.1


class LightNode:
    """What it does now, and what it knows of itself."""

    def __init__(self) -> None:
        self.is_stuck = False
        self.fat = b""
        self.num_requests = 0
        self.is_draining = False
        self.num_open = 0

    async def chat(self, request: Request) -> Response:
        self.num_requests += 1
        body = msgspec.json.decode(await request.body())
        if self.is_draining:
            return _refused("draining")
        if body.get("stream"):
            return StreamingResponse(
                self._chunks(body["max_tokens"]), media_type="text/event-stream"
            )
        text = " ".join([str(os.getpid())] * body.get("max_tokens", 1))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse(
            {"id": "x", "model": MODEL, "choices": [{**choice, "finish_reason": "stop"}],
             "usage": usage, "seen": dict(request.headers)}
        )  # fmt: skip

    async def _chunks(self, num_chunks: int) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            for at in range(num_chunks):
                is_last = at == num_chunks - 1
                delta = {"content": f"{os.getpid()} "}
                part = {"index": 0, "delta": delta, "finish_reason": "stop" if is_last else None}
                chunk = {"id": "x", "model": MODEL, "choices": [part]}
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
                await asyncio.sleep(CHUNK_EVERY_S)
            yield b"data: [DONE]\n\n" + UsageReport(1, 0, num_chunks).comment()
        finally:
            self.num_open -= 1

    async def behave(self, request: Request) -> Response:
        how = (await request.body()).decode()
        if how == "stuck":
            self.is_stuck = True
        elif how == "mute":
            # The whole loop is meant to hang, once this is answered.
            asyncio.get_running_loop().call_later(MUTE_AFTER_S, time.sleep, 3600)
        elif how == "fat":
            self.fat = os.urandom(FAT_BYTES)
        return Response()

    async def ready(self, request: Request) -> Response:
        return _refused("engine_restarting") if self.is_stuck else JSONResponse({"status": "ready"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/behave", self.behave, methods=["POST"]),
                Route("/ready", self.ready),
                Route("/v1/models", self.models),
            ]
        )


def _refused(code: str) -> Response:
    error = {"message": code, "type": "overloaded_error", "param": None, "code": code}
    return JSONResponse({"error": error}, 503, {"retry-after": "1"})


async def serve(node: LightNode, taken: socket.socket) -> None:
    told = stop_signals()
    watch_lifeline(told)
    server = http_server(node.app())
    serving = asyncio.create_task(server.serve(sockets=[taken]))
    await told.wait()
    node.is_draining = True
    while node.num_open:  # noqa: ASYNC110 - simple, for a node of the tests
        await asyncio.sleep(0.01)
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unix-socket", type=Path, required=True)
    parser.add_argument("--behave", default="")
    flags = parser.parse_args()
    if flags.behave.startswith("exit-"):
        print("kvota cannot start. It was told to fail.", file=sys.stderr)
        sys.exit(int(flags.behave.removeprefix("exit-")))
    if flags.behave == "slow-load":
        time.sleep(0.5)
    with bind_unix(flags.unix_socket) as taken:
        listen(taken)
        announce(NodeReady(model=MODEL, max_model_len=99, kv_tokens=99, planned_bytes=10**7 * 8))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(LightNode(), taken))


if __name__ == "__main__":
    main()

"""The least that a proxy can be: Starlette in front, aiohttp behind, bytes passed on as they come.

python -m bench.gateway_passthrough --port 8000 --backend http://127.0.0.1:9000

No key, no limit, no count, no desk, no routing: the yardstick of `make bench-gateway`.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


class PassThrough:
    """One client session for all that comes."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            yield

    async def pass_on(self, request: Request) -> Response:
        assert self._session is not None
        reply = await self._session.post(
            self._backend + request.url.path,
            data=await request.body(),
            headers={"content-type": "application/json"},
        )
        kind = reply.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            async with reply:
                return Response(await reply.read(), reply.status, media_type=kind)
        return StreamingResponse(_pieces(reply), reply.status, media_type=kind)


async def _pieces(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with reply:
        async for piece in reply.content.iter_any():
            yield piece


def create_app(backend: str) -> Starlette:
    proxy = PassThrough(backend)
    routes = [
        Route("/v1/chat/completions", proxy.pass_on, methods=["POST"]),
        Route("/health", lambda request: Response()),
    ]
    return Starlette(routes=routes, lifespan=proxy.life)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", required=True)
    flags = parser.parse_args()
    uvicorn.run(
        create_app(flags.backend), host="127.0.0.1", port=flags.port, log_level="warning",
        loop="uvloop", http="httptools", access_log=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()

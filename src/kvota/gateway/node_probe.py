"""A look at an engine process: does it answer, and does it make progress?"""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvota.core.clock import SystemClock
from kvota.core.errors import Refusal
from kvota.gateway.node_life import Probe
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.upstream.connection import UpstreamSettings
from kvota.gateway.upstream.failures import AttemptFailed


class NodeProbe:
    """Asks for its health, over a connection that is kept. `close` it on the loop that looked.

    On a unix socket the host of `url` is only for the header.
    """

    def __init__(
        self, socket: Path | None, url: str = "http://node/ready", *, timeout_s: float = 5.0
    ) -> None:
        parts = urlsplit(url)
        self._is_ours = socket is not None
        self._path = parts.path
        self._timeout_s = timeout_s
        settings = UpstreamSettings(
            name="node",
            url=f"{parts.scheme}://{parts.netloc}",
            unix_socket=None if socket is None else str(socket),
            connections_max=1,
        )
        self._upstream = NodeUpstream(settings, SystemClock())

    async def look(self) -> Probe:
        """Never raises. A node that drains is FINE: its end comes by itself.

        An engine of another kind that answers anything but 200 is not there yet, or ill.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._ask()
        except (TimeoutError, AttemptFailed):
            return Probe.SILENT
        if not self._is_ours:
            return Probe.FINE if status == 200 else Probe.SILENT
        is_stuck = status == 503 and _code(body) == Refusal.ENGINE_RESTARTING.value
        return Probe.STUCK if is_stuck else Probe.FINE

    async def _ask(self) -> tuple[int, bytes]:
        async with self._upstream.ask("GET", self._path, None, {}) as reply:
            return reply.status, await reply.error_body()

    async def close(self) -> None:
        await self._upstream.close()


class _Error(msgspec.Struct):
    code: str | None = None


class _Answer(msgspec.Struct):
    error: _Error | None = None


def _code(body: bytes) -> str | None:
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.MsgspecError:
        return None
    return answer.error.code if answer.error else None

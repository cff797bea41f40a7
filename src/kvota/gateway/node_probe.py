"""A look at a node on its unix socket: does it answer, and does it make progress?"""

import asyncio
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from kvota.core.errors import Refusal
from kvota.gateway.node_life import Probe

_URL: Final = "http://node/ready"  # the host is only for the header
_ANSWER_BYTES_MAX: Final = 64 * 1024


class NodeProbe:
    """Asks `/ready`, over a connection that is kept. `close` it on the loop that looked."""

    def __init__(self, socket: Path, *, timeout_s: float = 5.0) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def look(self) -> Probe:
        """Never raises. A node that drains is FINE: its end comes by itself."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._ask()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return Probe.SILENT
        is_stuck = status == 503 and _code(body) == Refusal.ENGINE_RESTARTING.value
        return Probe.STUCK if is_stuck else Probe.FINE

    async def _ask(self) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=1)
            self._session = aiohttp.ClientSession(connector=connector)
        async with self._session.get(_URL) as answer:
            return answer.status, await answer.content.read(_ANSWER_BYTES_MAX)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


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

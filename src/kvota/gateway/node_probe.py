"""A look at an engine process: does it answer, and does it make progress?"""

import asyncio
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from kvota.core.errors import Refusal
from kvota.gateway.node_life import Probe

_ANSWER_BYTES_MAX: Final = 64 * 1024


class NodeProbe:
    """Asks for its health, over a connection that is kept. `close` it on the loop that looked.

    On a unix socket the host of `url` is only for the header.
    """

    def __init__(
        self, socket: Path | None, url: str = "http://node/ready", *, timeout_s: float = 5.0
    ) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def look(self) -> Probe:
        """Never raises. A node that drains is FINE: its end comes by itself.

        An engine of another kind that answers anything but 200 is not there yet, or ill.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._ask()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return Probe.SILENT
        if self._socket is None:
            return Probe.FINE if status == 200 else Probe.SILENT
        is_stuck = status == 503 and _code(body) == Refusal.ENGINE_RESTARTING.value
        return Probe.STUCK if is_stuck else Probe.FINE

    async def _ask(self) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=self._connector(), trust_env=False)
        async with self._session.get(self._url) as answer:
            return answer.status, await answer.content.read(_ANSWER_BYTES_MAX)

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is None:
            return aiohttp.TCPConnector(limit=1)
        return aiohttp.UnixConnector(str(self._socket), limit=1)

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

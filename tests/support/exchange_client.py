"""The client's side of one Exchange, in memory: it reads, stalls, or goes away."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Message

from kvota.edge.exchange import Exchange
from kvota.edge.settings import EdgeSettings
from tests.support.asgi_caller import Reply


class ExchangeClient:
    """Make it on a running loop. `exchange` is what the server's side uses."""

    def __init__(self, *, headers: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.reply = Reply()
        self.has_heard = asyncio.Event()  # something of a body
        self._gone = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "headers": raw}
        self.exchange = Exchange(scope, self._receive, self._send, EdgeSettings(**settings))

    def leave(self) -> None:
        self._gone.set()

    def stall(self) -> None:
        """Read nothing any more."""
        self._reads.clear()

    async def _receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._reads.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {
                name.decode(): value.decode() for name, value in message["headers"]
            }
            return
        self.reply.pieces.append(message["body"])
        self.reply.is_complete = not message.get("more_body", False)
        self.has_heard.set()

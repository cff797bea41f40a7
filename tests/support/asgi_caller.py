"""Calls an ASGI application directly, with no socket between.

Unlike HTTP clients it can leave, stall, and look at what was sent so far.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from kvota.wire.sse import EventReader


@dataclass
class Reply:
    """A response as it was sent: `pieces` are the bodies of the single sends."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it has OpenAI's form."""
        body = self.json
        assert set(body) == {"error"}, body
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return error

    @property
    def events(self) -> list[str]:
        """The `data:` values of an event stream, the last one usually [DONE]."""
        return [value.decode() for value in EventReader().feed(self.content)]

    @property
    def chunks(self) -> list[Any]:
        return [msgspec.json.decode(value) for value in self.events if value != "[DONE]"]

    @property
    def comments(self) -> int:
        return len(self.remarks)

    @property
    def remarks(self) -> list[str]:
        """What the comments of an event stream say."""
        lines = self.content.splitlines()
        return [line[2:].decode() for line in lines if line.startswith(b": ")]


class Call:
    """One request under way."""

    def __init__(
        self, app: ASGIApp, scope: Mapping[str, Any], body: Sequence[bytes], *, is_whole: bool
    ) -> None:
        self.reply = Reply()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._is_held = asyncio.Event()
        self._body = list(body)
        self._is_whole = is_whole
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()
        self.task = asyncio.ensure_future(app(dict(scope), self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def until(self, met: Callable[[Reply], bool]) -> None:
        """Wait until what was sent meets a condition."""
        async with self._changed:
            async with asyncio.timeout(60):
                await self._changed.wait_for(lambda: met(self.reply))

    async def until_held(self) -> None:
        """Wait until the application stands in a send that `may_send` holds up."""
        async with asyncio.timeout(60):
            await self._is_held.wait()

    async def end(self) -> Reply:
        """Wait until the application has ended the request."""
        async with asyncio.timeout(60):
            await self.task
        return self.reply

    async def _receive(self) -> Message:
        if self._body:
            part = self._body.pop(0)
            more = bool(self._body) or not self._is_whole
            return {"type": "http.request", "body": part, "more_body": more}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self.may_send.is_set():
            self._is_held.set()
            await self.may_send.wait()
        async with self._changed:
            self._note(message)
            self._changed.notify_all()

    def _note(self, message: Message) -> None:
        reply = self.reply
        if message["type"] == "http.response.start":
            assert reply.status == 0, "a response starts once"
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        assert reply.status, "a body comes after its start"
        assert not reply.is_complete, "nothing follows the last piece"
        if message.get("body"):
            reply.pieces.append(message["body"])
        reply.is_complete = not message.get("more_body", False)


class Caller:
    """Calls an ASGI application like a client that has all the time in the world."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def begin(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None,
        *, is_whole: bool = True,
    ) -> Call:  # fmt: skip
        """Start a request. `body` is JSON to be, or bytes, or a list of byte parts.

        With `is_whole` False more of the body is announced and never comes.
        """
        parts: list[bytes]
        if isinstance(body, list) and body and all(isinstance(part, bytes) for part in body):
            parts = body
        else:
            parts = [_encoded(body)]
        fields = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").lower().encode(), value.encode("latin-1"))
                for name, value in fields.items()
                if value
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Call(self._app, scope, parts, is_whole=is_whole)

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and wait for the end of its response."""
        return await self.begin(method, path, body, headers).end()

    @asynccontextmanager
    async def open(self, path: str, body: Any, **headers: str) -> AsyncIterator[Call]:
        """A POST that is made to end when the block does."""
        call = self.begin("POST", path, body, headers)
        try:
            yield call
        finally:
            call.may_send.set()
            call.leave()
            await call.end()


def _encoded(body: Any) -> bytes:
    if body is None:
        return b""
    return body if isinstance(body, bytes) else msgspec.json.encode(body)

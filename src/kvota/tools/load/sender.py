"""One streaming request over HTTP, timed: on any server that speaks OpenAI's dialect.

    async with Sender(url, api_key, model="tiny") as sender:
        seen = await sender.send(Asked(prompt=[5, 6, 7], max_tokens=16))

An event is timed when its bytes arrive, before it is parsed. Only events with text, or reasoning,
count as tokens: neither the role at the start nor the usage at the end does.
"""

import asyncio
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec

from kvota.core.clock import Clock, SystemClock
from kvota.core.request import Band
from kvota.tools.load.asked import CONNECTION, UNFINISHED, Asked, Seen
from kvota.tools.load.stream import StreamRecord
from kvota.tools.server import authorization, root_of

TIMEOUT_S = 600.0  # of one answer, where the caller knows no better
CONNECT_TIMEOUT_S = 10.0
# Shorter than servers keep theirs, so that no request meets one that is being closed.
KEEPALIVE_S = 3.0
PRIORITY_HEADER = "x-kvota-priority"
READ_BYTES = 2**17
ERROR_BYTES_MAX = 2**16


class Send(Protocol):
    """What the generator needs of a sender."""

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen: ...


class Sender:
    """Connections to one server. Sends `model`, `max_tokens` and greedy sampling.

    Several choices are drawn at random: some servers refuse to make equal ones.

    `is_chat`: each prompt becomes one user message, sent to /v1/chat/completions.
    `is_forced`: also send ignore_eos and min_tokens, so that outputs have exactly `max_tokens`.
    `keeps_text`: Seen.text has the whole answer.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str,
        is_chat: bool = False,
        is_forced: bool = True,
        has_usage: bool = True,
        keeps_text: bool = False,
        timeout_s: float = TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        self.url = root_of(url)
        self.model = model
        self.is_chat = is_chat
        self.is_forced = is_forced
        self.has_usage = has_usage
        self.keeps_text = keeps_text
        self._headers = authorization(api_key) | {"content-type": "application/json"}
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
            headers=self._headers,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        """Send now and follow the answer to its end. Never raises for what the server does.

        `origin_s`: the clock's time at the start of the run; without it the request is due now.
        `until_s`: the run is over then, and an answer that is not has the code UNFINISHED.
        """
        body, headers = self.body(asked), _headers_of(asked)
        now = self._clock.now()
        due_s = now if origin_s is None else origin_s + asked.scheduled_s
        record = StreamRecord(self._clock, due_s, keeps_text=self.keeps_text)
        left_s = self._timeout_s if until_s is None else until_s - now
        try:
            async with asyncio.timeout(min(self._timeout_s, left_s)):
                await self._follow(body, headers, record)
        except TimeoutError:
            if left_s < self._timeout_s:
                record.fail(UNFINISHED, "the run was over")
            else:
                record.fail("client_timeout", f"no end within {self._timeout_s:g} s")
        except aiohttp.ClientError as error:
            record.fail(CONNECTION, f"{type(error).__name__}: {error}")
        return record.seen(asked, sent_s=now - due_s)

    def body(self, asked: Asked) -> bytes:
        """The request as it is sent."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": asked.max_tokens}
        if self.is_chat:
            assert isinstance(asked.prompt, str), "chat takes text"
            fields["messages"] = [{"role": "user", "content": asked.prompt}]
        else:
            fields["prompt"] = asked.prompt
        fields |= {"temperature": 0 if asked.n == 1 else 1, "stream": True}
        if asked.n > 1:
            fields["n"] = asked.n
        if self.has_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.is_forced:
            fields |= {"ignore_eos": True, "min_tokens": asked.max_tokens}
        return msgspec.json.encode(fields)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    async def _follow(self, body: bytes, headers: dict[str, str], record: StreamRecord) -> None:
        assert self._session is not None, "use the sender in an `async with`"
        url = self.url + self.path
        async with self._session.post(url, data=body, headers=headers) as response:
            record.begin(response.status, response.headers)
            if response.status != 200 or "event-stream" not in response.content_type:
                record.take_body(await response.content.read(ERROR_BYTES_MAX))
                return
            async for received in response.content.iter_any():
                record.feed(received)  # to the last byte: only then is the connection free again
            record.finish()


def _headers_of(asked: Asked) -> dict[str, str]:
    return {PRIORITY_HEADER: "batch"} if asked.band is Band.BATCH else {}

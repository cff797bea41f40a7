"""The HTTP client of one of our own nodes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kvota.core.clock import Clock
from kvota.gateway.upstream.connection import Upstream, UpstreamReply, UpstreamSettings


class NodeUpstream(Upstream):
    """The client of one node, which hands over every answer, whatever its status."""

    def __init__(self, settings: UpstreamSettings, clock: Clock) -> None:
        super().__init__(settings, clock)
        self._node_clock = clock

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[UpstreamReply]:
        """Raises AttemptFailed where no answer comes. The node keeps the request's deadlines."""
        wait_s = self.settings.first_byte_timeout_s
        response = await self._ask(method, path, body, headers, None, wait_s)
        reply = UpstreamReply(response, self.settings, self._node_clock, None)
        try:
            yield reply
        finally:
            reply.close()

"""The HTTP client of one of our own nodes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kvota.gateway.upstream.connection import Upstream, UpstreamReply


class NodeUpstream(Upstream):
    """The client of one node, which hands over every answer, whatever its status."""

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[UpstreamReply]:
        """Raises AttemptFailed where no answer comes. The node keeps the request's deadlines."""
        wait_s = self.settings.first_byte_timeout_s
        reply = await self._ask(method, path, body, headers, None, wait_s)
        try:
            yield reply
        finally:
            reply.close()

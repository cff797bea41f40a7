"""The HTTP client of one of our own nodes."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from kvota.gateway.upstream.connection import Open, Upstream, UpstreamReply


class NodeUpstream(Upstream):
    """The client of one node, which hands over every answer, whatever its status."""

    def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[UpstreamReply]:
        """Raises AttemptFailed where no answer comes. The node keeps the request's deadlines."""
        wait_s = self.settings.first_byte_timeout_s
        return Open(self._ask(method, path, body, headers, None, wait_s))

"""The server that is watched: three GETs make one Reading, a DELETE ends a request."""

import asyncio
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import msgspec

from kvota.tools.server import ServerUnusable, authorization, error_text, message_of, root_of
from kvota.tools.top.samples import Samples
from kvota.wire.requests import DeletedRequest, LiveRequest, LiveRequestList

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server said of itself at one moment."""

    requests: tuple[LiveRequest, ...]
    samples: Samples
    not_ready: str | None = None  # why; None when it is ready


class Server:
    """One server over HTTP. Every method raises ServerUnusable with a message for people."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    async def read(self) -> Reading:
        requests, metrics, ready = await asyncio.gather(
            self._call("GET", "/admin/requests"),
            self._call("GET", "/metrics"),
            self._call("GET", "/ready"),
        )
        not_ready = None if ready.is_success else message_of(ready)
        try:
            listed = msgspec.json.decode(_accepted(requests).content, type=LiveRequestList)
            samples = Samples.parse(_accepted(metrics).text)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ServerUnusable(f"{self.url} does not answer like kvota: {error}.") from error
        return Reading(tuple(listed.data), samples, not_ready)

    async def cancel(self, id_: str) -> int:
        """End a request; returns how many were ended."""
        response = await self._call("DELETE", f"/admin/requests/{quote(id_)}")
        return msgspec.json.decode(_accepted(response).content, type=DeletedRequest).num_cancelled

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str) -> httpx.Response:
        try:
            return await self._client.request(method, path)
        except httpx.TimeoutException:
            raise ServerUnusable(f"{self.url} did not answer within {TIMEOUT_S:g} s.") from None
        except httpx.HTTPError as error:
            raise ServerUnusable(f"No answer from {self.url}: {error}.") from error


def connect(url: str, api_key: str | None = None) -> Server:
    """The server at `url` (with or without a trailing /v1)."""
    return Server(
        httpx.AsyncClient(
            base_url=root_of(url),
            headers=authorization(api_key),
            timeout=TIMEOUT_S,
            trust_env=False,  # what is watched is near; a proxy would only be in the way
        )
    )


def _accepted(response: httpx.Response) -> httpx.Response:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ServerUnusable(f"{error_text(response)} Give an operator's key with --api-key.")
    if not response.is_success:
        raise ServerUnusable(error_text(response))
    return response

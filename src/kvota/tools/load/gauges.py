"""What the server says of itself on its metrics page, in kvota's names, vLLM's or SGLang's.

Behind a gateway, what it says of its node or its backends: the first name that is there counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import httpx

from kvota.tools.server import authorization
from kvota.tools.top.samples import Samples

MEMORY: Final = ("process_resident_memory_bytes", "kvota_gateway_node_resident_bytes")
KV_TOUCHED: Final = ("kvota_kv_touched_bytes",)
KV: Final = (
    "kvota_kv_cache_usage_ratio",
    "vllm:kv_cache_usage_perc",
    "sglang:token_usage",
    "kvota_gateway_backend_kv_usage_ratio",
)
RUNNING: Final = (
    "kvota_requests_running",
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "kvota_gateway_backend_requests_running",
)
WAITING: Final = (
    "kvota_requests_waiting",
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "kvota_gateway_backend_requests_waiting",
)
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """One look. None: the server does not say.

    `kv_touched_bytes`, part of `memory_bytes`, is of the KV blocks that were ever used.
    """

    memory_bytes: float | None = None
    kv_share: float | None = None
    num_open: float | None = None
    kv_touched_bytes: float | None = None

    @classmethod
    def of(cls, samples: Samples) -> "Gauges":
        running, waiting = _first(samples, RUNNING), _first(samples, WAITING)
        num_open = None if running is None else running + (waiting or 0.0)
        touched = _first(samples, KV_TOUCHED)
        return cls(_first(samples, MEMORY), _first(samples, KV), num_open, touched)


class Page(Protocol):
    """Where a server is looked at."""

    async def look(self) -> Gauges: ...


class GaugePage:
    """GET /metrics of one server. Use it in an `async with`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, headers=authorization(api_key), timeout=TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> "GaugePage":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def look(self) -> Gauges:
        """All None where there is no such page, or it cannot be reached now."""
        try:
            page = await self._client.get("/metrics")
            return Gauges.of(Samples.parse(page.text)) if page.is_success else Gauges()
        except (httpx.HTTPError, ValueError):
            return Gauges()


def _first(samples: Samples, names: Sequence[str]) -> float | None:
    values = (samples.total(name) for name in names)
    return next((value for value in values if value is not None), None)

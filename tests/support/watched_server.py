"""A server for `kvota top` to watch: what it says is written by the test."""

import time
from typing import Any

import httpx
import msgspec

from kvota.tools.top.samples import Samples
from kvota.tools.top.server import Reading, Server
from kvota.wire.requests import DeletedRequest, LiveRequest, LiveRequestList


def live(id_: str, **changes: Any) -> LiveRequest:
    """A short request that decodes, or whatever `changes` say."""
    fields: dict[str, Any] = {
        "id": id_, "client_id": f"client-{id_}", "tenant": "team-a", "model": "tiny",
        "lane": "short", "band": "interactive", "phase": "decode", "age_s": 1.0,
        "position": None, "eta_s": None, "why": None, "prompt_tokens": 40, "computed_tokens": 45,
        "cached_tokens": 0, "output_tokens": 5, "max_tokens": 64, "num_choices": 1,
        "tokens_per_s": 12.3, "kv_blocks": 3, "num_preemptions": 0,
    }  # fmt: skip
    return LiveRequest(**{**fields, **changes})


def queued(id_: str, position: int, **changes: Any) -> LiveRequest:
    waiting = {
        "phase": "queued", "position": position, "eta_s": 2.0 * position, "why": "KV memory",
        "computed_tokens": 0, "output_tokens": 0, "tokens_per_s": None, "kv_blocks": 0,
    }  # fmt: skip
    return live(id_, **{**waiting, **changes})


def page(
    *, tokens: float = 0, used: int = 0, cached: int = 0, free: int = 0, running: int = 0,
    waiting: int = 0, preemptions: int = 0, refused: dict[str, int] | None = None,
    started_s: float | None = None,
) -> str:  # fmt: skip
    """A Prometheus page with what `kvota top` reads of it."""
    lines = [
        f"kvota_generated_tokens_total {tokens}",
        f'kvota_kv_blocks{{state="used"}} {used}',
        f'kvota_kv_blocks{{state="cached"}} {cached}',
        f'kvota_kv_blocks{{state="free"}} {free}',
        f'kvota_requests_running{{lane="short"}} {running}',
        'kvota_requests_running{lane="long"} 1',
        f'kvota_requests_waiting{{lane="short",band="interactive"}} {waiting}',
        f"kvota_preemptions_total {preemptions}",
        'vllm:num_requests_running{model_name="tiny"} 1',
    ]
    for reason, count in (refused or {}).items():
        lines.append(f'kvota_rejected_total{{reason="{reason}"}} {count}')
    if started_s is not None:
        lines.append(f"process_start_time_seconds {started_s}")
    return "\n".join([*lines, ""])


def reading(*requests: LiveRequest, not_ready: str | None = None, **facts: Any) -> Reading:
    return Reading(requests, Samples.parse(page(**facts)), not_ready)


class WatchedServer:
    """Answers like kvota; `is_down` breaks every connection, `refusal` answers everything."""

    def __init__(self) -> None:
        self.requests = [live("a"), live("b", kv_blocks=5), queued("c", 1)]
        self.facts: dict[str, Any] = {"used": 8, "cached": 2, "free": 6, "started_s": time.time()}
        self.is_down = False
        self.refusal: httpx.Response | None = None
        self.not_ready: str | None = None
        self.deleted: list[str] = []
        self.num_looks = 0

    def server(self) -> Server:
        transport = httpx.MockTransport(self._answer)
        return Server(httpx.AsyncClient(base_url="http://test", transport=transport))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("All connection attempts failed")
        if self.refusal is not None:
            return self.refusal
        path = request.url.path
        if request.method == "DELETE":
            return self._delete(path.removeprefix("/admin/requests/"))
        if path == "/metrics":
            return httpx.Response(200, text=page(**self.facts))
        if path == "/ready":
            return self._ready()
        assert path == "/admin/requests", path
        self.num_looks += 1
        body = LiveRequestList(data=self.requests)
        return httpx.Response(200, content=msgspec.json.encode(body))

    def _ready(self) -> httpx.Response:
        if self.not_ready is None:
            return httpx.Response(200, json={"status": "ready"})
        return httpx.Response(503, json={"error": {"message": self.not_ready}})

    def _delete(self, id_: str) -> httpx.Response:
        if id_ not in [request.id for request in self.requests]:
            return httpx.Response(404, json={"error": {"message": f"No request `{id_}`."}})
        self.deleted.append(id_)
        self.requests = [request for request in self.requests if request.id != id_]
        body = DeletedRequest(id=id_, num_cancelled=1)
        return httpx.Response(200, content=msgspec.json.encode(body))

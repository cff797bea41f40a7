"""Where requests are, as `GET /v1/requests` and `GET /admin/requests` say it.

Nothing here shows what a request says: no prompt and no output, only counts and places. Absent
is null. Times are seconds, speeds tokens per second, both rounded: they are for people.
"""

from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

# With these as its basis an ETA is the latest moment: nothing is known yet to expect one from.
LATEST: Final = frozenset({"max_tokens", "deadlines"})


class LiveRequest(Struct, kw_only=True):
    """A request that has not ended."""

    id: str  # ours: what DELETE takes
    object: Literal["request"] = "request"
    client_id: str  # the client's x-request-id, or ours; DELETE takes it too
    tenant: str | UnsetType = UNSET  # only for operators
    backend: str | UnsetType = UNSET  # where it is, as a gateway says
    model: str
    lane: str
    band: str
    phase: str  # queued, prefill, decode, paused or closing
    age_s: float
    position: int | None  # in line
    eta_s: float | None  # to the first chunk
    eta_basis: str | None = None  # forecast or line, or one of LATEST
    why: str | None  # what it waits for
    prompt_tokens: int
    computed_tokens: int  # of prompt and output, in KV
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    num_choices: int
    tokens_per_s: float | None
    kv_blocks: int
    num_preemptions: int


class LiveRequestList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[LiveRequest]


class DeletedRequest(Struct, kw_only=True):
    """The answer to DELETE. `id` is what was asked for; several may have shared it."""

    id: str
    object: Literal["request.deleted"] = "request.deleted"
    deleted: bool = True
    num_cancelled: int  # 1, or more when several live requests share the client's id

"""Where a request is: what the desk and the engine know of it, in one view without any text."""

from typing import Final

from kvota.core.request import Request
from kvota.desk.desk import Desk
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskSnapshot
from kvota.desk.ticket import Lane, Stage
from kvota.desk.waiting import why_waiting
from kvota.edge.trust import ANONYMOUS
from kvota.engine.mailbox import RequestState
from kvota.node.ports import Phase, RequestView
from kvota.node.pricing import CLIENT_ID, TENANT
from kvota.telemetry.metrics import DeskGauges

# Settings of the desk that a reader of its metrics must know to judge them.
SHOWN: Final = (
    "risk", "max_running_requests", "max_waiting_queue", "long_request_threshold",
    "long_request_concurrency", "long_kv_share", "queue_timeout_s", "request_timeout_s",
    "first_token_timeout_s", "long_first_token_timeout_s",
)  # fmt: skip


def view_of(
    desk: Desk,
    seen: DeskSnapshot,
    request: Request,
    state: RequestState | None,
    now: float,
    model: str,
) -> RequestView:
    """`state` is what the engine says; None while it does not know the request."""
    place = desk.position(request.id, now)
    return RequestView(
        id=request.id,
        client_id=str(request.labels.get(CLIENT_ID, request.id)),
        tenant=str(request.labels.get(TENANT, ANONYMOUS)),
        model=model,
        lane=(desk.lane(request.id) or Lane.SHORT).value,
        band=request.band.name.lower(),
        phase=_phase(desk.stage(request.id), state),
        age_s=now - request.arrived_s,
        position=place.position + 1 if place is not None else None,
        eta_s=place.eta_s if place is not None else None,
        eta_basis=place.basis.value if place is not None else None,
        why=why_waiting(desk, request.id, seen) if place is not None else None,
        prompt_tokens=len(request.prompt),
        computed_tokens=state.computed_tokens if state is not None else 0,
        cached_tokens=state.cached_tokens if state is not None else 0,
        output_tokens=state.output_tokens if state is not None else 0,
        max_tokens=request.max_tokens,
        num_choices=request.n,
        tokens_per_s=_tokens_per_s(state, now),
        kv_blocks=state.num_blocks if state is not None else 0,
        num_preemptions=state.num_preemptions if state is not None else 0,
    )


def _phase(stage: Stage, state: RequestState | None) -> Phase:
    match stage:
        case Stage.QUEUED:
            return Phase.QUEUED
        case Stage.PAUSED:
            return Phase.PAUSED
        case Stage.CLOSING | Stage.CLOSED:
            return Phase.CLOSING
    return Phase.DECODE if state is not None and state.is_prompt_read else Phase.PREFILL


def _tokens_per_s(state: RequestState | None, now: float) -> float | None:
    if state is None or state.first_token_s is None or state.output_tokens < 2:
        return None
    age_s = now - state.first_token_s
    return (state.output_tokens - 1) / age_s if age_s > 0 else None


def desk_gauges(now: DeskSnapshot, settings: DeskSettings, block_size: int) -> DeskGauges:
    """What the metrics page shows of the desk."""
    return DeskGauges(
        running={lane.value: number for lane, number in now.running.items()},
        waiting={
            (lane.value, band.name.lower()): number for (lane, band), number in now.waiting.items()
        },
        num_waiting=now.num_waiting_choices,
        num_blocks_held_after_end=-(-now.held_after_end_tokens // block_size),
        limits={name: value for name in SHOWN if (value := getattr(settings, name)) is not None},
    )

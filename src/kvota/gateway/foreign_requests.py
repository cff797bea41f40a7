"""Where requests are whose desk is here: those that wait for a foreign engine, and those in it.

As a node tells it of its own (`wire/requests.py`), as far as that can be seen from outside: how a
prompt's reading gets on, and which blocks are held, the engine does not say.
"""

from collections.abc import Iterator

from msgspec import UNSET

from kvota.gateway.backends import Backend
from kvota.gateway.live import Live
from kvota.gateway.upstream.foreign_desk import ForeignDesk
from kvota.gateway.upstream.place import Place
from kvota.wire.requests import LiveRequest


def foreign_requests(
    live: Live, now: float, *, tenant: str | None, with_tenant: bool
) -> list[LiveRequest]:
    """The requests of a tenant; None: of all."""
    return [
        _shown(backend, desk, place, live, now, with_tenant=with_tenant)
        for backend, desk in _desks(live)
        for place in desk.places
        if tenant in (None, place.ticket.tenant)
    ]


def cancel_foreign(live: Live, name: str, *, tenant: str | None) -> int:
    """End what answers to the id, ours or the client's; how many did."""
    return sum(
        desk.cancel(place.ticket.id)
        for _, desk in _desks(live)
        for place in desk.places
        if name in (place.ticket.id, place.client_id) and tenant in (None, place.ticket.tenant)
    )


def has_foreign(live: Live) -> bool:
    return any(True for _ in _desks(live))


def _desks(live: Live) -> Iterator[tuple[Backend, ForeignDesk]]:
    """Every desk that is kept here, each once."""
    for backend in live.backends:
        for desk in backend.desks:
            yield backend, desk


def _shown(
    backend: Backend, desk: ForeignDesk, place: Place, live: Live, now: float, *, with_tenant: bool
) -> LiveRequest:
    ticket, waits = place.ticket, desk.waits(place.ticket.id)
    output = place.output_tokens
    return LiveRequest(
        id=ticket.id,
        client_id=place.client_id,
        tenant=ticket.tenant if with_tenant else UNSET,
        backend=backend.name,
        model=_public_name(backend, ticket.model, live),
        lane=desk.lane(ticket.id).value,
        band=ticket.band.name.lower(),
        phase=_phase(place),
        age_s=round(now - ticket.arrived_s, 3),
        position=None if waits is None else waits.position + 1,
        eta_s=None if waits is None else round(waits.eta_s, 1),
        eta_basis=None if waits is None else waits.basis.value,
        why=None if waits is None else desk.why(ticket.id),
        prompt_tokens=place.prompt_tokens,
        computed_tokens=place.prompt_tokens + output if output else 0,
        cached_tokens=0,
        output_tokens=output,
        max_tokens=ticket.max_tokens,
        num_choices=ticket.n,
        tokens_per_s=_tokens_per_s(place, now),
        kv_blocks=0,
        num_preemptions=0,
    )


def _phase(place: Place) -> str:
    """In the words of a node."""
    if place.cut_by is not None or place.is_closed:
        return "closing"
    if place.lease is None:
        return "queued"
    return "decode" if place.output_tokens else "prefill"


def _tokens_per_s(place: Place, now: float) -> float | None:
    if place.first_token_s is None or place.output_tokens < 2 or now <= place.first_token_s:
        return None
    return round((place.output_tokens - 1) / (now - place.first_token_s), 1)


def _public_name(backend: Backend, model: str, live: Live) -> str:
    """What clients call the model that the backend calls `model`."""
    for route in live.now.table.routes.values():
        for version in route.versions.values():
            if version.model == model and backend in version.backends:
                return route.name
    return model  # a reload has taken it away meanwhile

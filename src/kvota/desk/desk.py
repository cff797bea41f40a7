"""The desk: every request is priced in KV memory, and runs, waits, or is refused honestly.

Public calls (all pure; `now` is seconds of the caller's clock and never goes back):

    Desk(capacity_tokens: int, settings: DeskSettings, forecast: Forecast, *,
         block_size: int = 1, observer: DeskObserver | None = None)
    arrive(ticket, now) -> Granted(lease) | Queued(position, eta_s) | Refused(reason, …)
    progress(lease_id, produced, now, *, choice=0, is_done=False, private_tokens=None) -> None
    cancel(ticket_id, outcome, now) -> list[Lease]      client gone, shutdown: queued → closed,
                                                        holding → closing
    release(lease_id, outcome, now, *, is_natural=…) -> list[Lease]   the blocks are back
    paused(lease_id, now) -> list[Lease]                the blocks of a Pause are back
    tick(now) -> Ticked(granted, expired, overdue, pauses)
    position(ticket_id, now) -> Queued | None
    snapshot() -> DeskSnapshot · check() -> None
"""

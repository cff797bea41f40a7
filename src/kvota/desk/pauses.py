"""Which leases to pause so that a short ticket that has waited too long can begin.

Who may be paused: leases of the long lane, or of a later band than the ticket's, that have held
their KV for a minimum time and were not paused too often. Who is paused: batch before long, the
latest granted first, and no more than needed; the last one needed alone, if it is enough.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvota.desk.entry import Entry
from kvota.desk.ledger import Ledger
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Lane, Stage


def choose_pauses(
    head: Entry,
    holders: Iterable[Entry],
    ledger: Ledger,
    settings: DeskSettings,
    *,
    num_choices: int,
    now: float,
) -> Sequence[Entry]:
    """Leases without which `head` fits; none when no set of them is enough."""

    def makes_room(victims: Sequence[Entry]) -> bool:
        taken = num_choices - sum(victim.size for victim in victims) + head.size
        if taken > settings.max_running_requests:
            return False
        return ledger.fits([head.claim], without=[victim.id for victim in victims])

    if makes_room([]):
        return []  # it waits for its turn, not for memory
    candidates = [one for one in holders if _may_pause(one, head, settings, now)]
    candidates.sort(key=_last_first)
    if not candidates or not makes_room(candidates):
        return []
    count = bisect_left(
        range(1, len(candidates)), True, key=lambda count: makes_room(candidates[:count])
    )
    last = candidates[count : count + 1]
    return last if count and makes_room(last) else candidates[: count + 1]


def _may_pause(entry: Entry, head: Entry, settings: DeskSettings, now: float) -> bool:
    is_less_urgent = entry.lane is Lane.LONG or entry.band > head.band
    has_run = entry.granted_s is not None and now - entry.granted_s >= settings.preempt_min_run_s
    return (
        is_less_urgent
        and has_run
        and entry.band >= head.band
        and entry.stage in (Stage.GRANTED, Stage.RUNNING)
        and entry.num_pauses < settings.preemptions_max
    )


def _last_first(entry: Entry) -> tuple[int, float]:
    assert entry.granted_s is not None
    return -entry.band, -entry.granted_s

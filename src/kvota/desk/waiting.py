"""What a ticket waits for, in words for the one who waits."""

from kvota.desk.desk import Desk
from kvota.desk.tally import DeskSnapshot
from kvota.desk.ticket import Lane, Stage


def why_waiting(desk: Desk, ticket_id: str, seen: DeskSnapshot) -> str:
    """What a waiting ticket waits for, in a few plain words. `seen` is the desk's snapshot."""
    if desk.stage(ticket_id) is Stage.PAUSED:
        return "paused for shorter requests"
    settings = desk.settings
    if seen.num_choices >= settings.max_running_requests:
        return f"all {settings.max_running_requests} places are taken"
    is_long = desk.lane(ticket_id) is Lane.LONG
    if is_long and seen.running[Lane.LONG] >= settings.long_request_concurrency:
        return f"{settings.long_request_concurrency} long requests are running already"
    return "KV memory"

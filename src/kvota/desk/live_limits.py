"""What of a desk may change while it works, and what a change leaves behind.

Changeable are the three counts that are looked at for each decision. The rest shapes what was
promised or learned already (forecast, shares, deadlines of tickets in line): it needs a restart.
The capacity is no setting: it changes with what the engine has.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

from kvota.core.errors import ConfigError
from kvota.desk.settings import DeskSettings

LIVE: Final = ("max_running_requests", "max_waiting_queue", "long_request_concurrency")


@dataclass(frozen=True, slots=True)
class Kept:
    """What was here when the limits last changed. It may stay, above them if need be."""

    num_choices: int = 0  # that held KV
    num_long: int = 0  # tickets of the long lane that did
    num_waiting: int = 0  # choices within a band's bound or beyond it, whatever is most
    peak_tokens: float = 0.0  # lent, when the capacity last changed

    def limits_changed(self, num_choices: int, num_long: int, num_waiting: int) -> "Kept":
        return Kept(num_choices, num_long, num_waiting, self.peak_tokens)

    def capacity_changed(self, peak_tokens: float) -> "Kept":
        return replace(self, peak_tokens=peak_tokens)


def check_change(old: DeskSettings, new: DeskSettings, *, largest: int) -> None:
    """Raises ConfigError for a change that cannot be made now.

    `largest`: choices of the largest ticket that runs or waits. With fewer places than that it
    would wait for ever, and everybody behind it.
    """
    for field in fields(DeskSettings):
        if field.name not in LIVE and getattr(old, field.name) != getattr(new, field.name):
            raise ConfigError(
                f"{field.name} cannot change while the server runs; {', '.join(LIVE)} can."
            )
    if new.max_running_requests < largest:
        raise ConfigError(
            f"max_running_requests cannot be {new.max_running_requests} now: a request for "
            f"{largest} choices is here. Try again when it has ended."
        )

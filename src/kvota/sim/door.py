"""Who lets requests through to the engine. The desk is one; no desk at all is another.

arrive ──▶ Go │ Wait(position, eta) │ No(reason, retry_after)
ended, paused, leave, tick ──▶ Moves(granted, expired, overdue, pauses)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Delta, Request
from kvota.traffic.arrival import Arrival


@dataclass(frozen=True, slots=True)
class Go:
    """The request may run now."""


@dataclass(frozen=True, slots=True)
class Wait:
    position: int
    eta_s: float | None  # for the lease; None: the door does not say
    is_latest: bool = False  # the lease comes by then; no prediction


@dataclass(frozen=True, slots=True)
class No:
    reason: Refusal
    retry_after_s: float


Verdict = Go | Wait | No
GO = Go()


@dataclass(frozen=True, slots=True)
class Moves:
    """What time or room changed in the line, by request id."""

    granted: Sequence[str] = ()
    expired: Sequence[tuple[str, Outcome]] = ()  # have ended in line
    overdue: Sequence[tuple[str, Outcome]] = ()  # are to be stopped, to end like this
    pauses: Sequence[str] = ()  # are to give their KV back and go on when granted again


NOTHING = Moves()


class Door(Protocol):
    """Every request that arrives gets one verdict; one that went through is `ended` once."""

    def arrive(self, request: Request, arrival: Arrival, now: float) -> Verdict: ...

    def progress(self, request_id: str, delta: Delta, now: float) -> None: ...

    def ended(self, request_id: str, outcome: Outcome, now: float) -> Moves:
        """The engine has given its blocks back."""

    def paused(self, request_id: str, now: float) -> Moves:
        """The engine has given its blocks back, and it is to go on later."""

    def leave(self, request_id: str, now: float) -> Moves:
        """Its client went away while it waited here."""

    def tick(self, now: float) -> Moves: ...

    def check(self) -> None:
        """Prove its invariants; raises AssertionError."""


class OpenDoor:
    """No desk: all go to the engine's own line, until `num_open_max` are open."""

    def __init__(self, num_open_max: int, retry_after_s: float = 5.0) -> None:
        self._num_open_max = num_open_max
        self._no = No(Refusal.QUEUE_FULL, retry_after_s)
        self._num_open = 0

    def arrive(self, request: Request, arrival: Arrival, now: float) -> Verdict:
        if self._num_open >= self._num_open_max:
            return self._no
        self._num_open += 1
        return GO

    def progress(self, request_id: str, delta: Delta, now: float) -> None:
        """Nobody wants to know."""

    def ended(self, request_id: str, outcome: Outcome, now: float) -> Moves:
        self._num_open -= 1
        return NOTHING

    def leave(self, request_id: str, now: float) -> Moves:
        raise AssertionError(f"{request_id} cannot wait at a door without a line")

    def paused(self, request_id: str, now: float) -> Moves:
        raise AssertionError(f"nobody asked {request_id} to pause")

    def tick(self, now: float) -> Moves:
        return NOTHING

    def check(self) -> None:
        assert 0 <= self._num_open <= self._num_open_max

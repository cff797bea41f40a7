"""What a request's headers say, and what every request gets: an id and its deadlines."""

import math
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import InvalidRequest
from kvota.core.request import Band
from kvota.edge.problems import RawHeaders
from kvota.edge.settings import EdgeSettings
from kvota.edge.trust import ANONYMOUS, tenant_of, weight_of

REQUEST_ID_LENGTH_MAX: Final = 128
_ID_DIGITS: Final = 24  # hexadecimal
_IDS_AHEAD: Final = 32
_UNSAFE = re.compile(rb"[^A-Za-z0-9._:/+=@-]")
_DEADLINE: Final = "x-kvota-deadline-s"
_PRIORITY: Final = "x-kvota-priority"
_DEADLINE_HEADER: Final = _DEADLINE.encode()
_PRIORITY_HEADER: Final = _PRIORITY.encode()
_BANDS: Final = {b"interactive": Band.INTERACTIVE, b"batch": Band.BATCH}


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """When a request came, how long it may take, and what it is called. Clock seconds."""

    id: str  # ours, unique, whatever the client says
    client_id: str  # the client's, or ours: echoed and logged
    arrived_s: float
    queue_deadline_s: float
    deadline_s: float
    band: Band
    created: int  # unix seconds
    tenant: str = ANONYMOUS  # as the gateway says, where there is one
    weight: float | None = None  # of the tenant; None: what the settings say
    num_bytes: int = 0  # of its body


class Arrivals:
    """Makes Arrivals. `unix_time` gives wall-clock seconds."""

    def __init__(
        self, settings: EdgeSettings, clock: Clock, unix_time: Callable[[], float], chance: Random
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._unix_time = unix_time
        self._chance = chance
        self._ids: list[str] = []  # made ahead, for chance may be a system call

    def new_id(self) -> str:
        if not self._ids:
            num_digits = _ID_DIGITS * _IDS_AHEAD
            drawn = f"{self._chance.getrandbits(4 * num_digits):0{num_digits}x}"
            self._ids = [drawn[at : at + _ID_DIGITS] for at in range(0, len(drawn), _ID_DIGITS)]
        return self._ids.pop()

    def make(self, id_: str, arrived_s: float, headers: Mapping[bytes, bytes]) -> Arrival:
        """Raises InvalidRequest, with the header as `param`."""
        settings = self._settings
        is_told, limit_s = settings.trusts_gateway, settings.request_timeout_s
        wanted_s = _deadline_s(headers)
        if wanted_s is not None and wanted_s < limit_s:
            limit_s = wanted_s
        queue_limit_s = settings.queue_timeout_s
        return Arrival(
            id=id_,
            client_id=client_id(headers) or id_,
            arrived_s=arrived_s,
            queue_deadline_s=arrived_s + (queue_limit_s if queue_limit_s < limit_s else limit_s),
            deadline_s=arrived_s + limit_s,
            band=_band(headers),
            created=int(self._unix_time()),
            tenant=tenant_of(headers) if is_told else ANONYMOUS,
            weight=weight_of(headers) if is_told else None,
        )


def id_headers(request_id: str) -> RawHeaders:
    """How an answer says which request it belongs to: under our name, and the official SDKs'."""
    name = request_id.encode()
    return [(b"x-kvota-request-id", name), (b"x-request-id", name)]


def client_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's own request id, harmless and short; None when it gave none."""
    given = headers.get(b"x-request-id")
    if not given:
        return None
    safe = _UNSAFE.sub(b"", given[: 4 * REQUEST_ID_LENGTH_MAX])
    return safe[:REQUEST_ID_LENGTH_MAX].decode("ascii") or None


def _deadline_s(headers: Mapping[bytes, bytes]) -> float | None:
    given = headers.get(_DEADLINE_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"The header {_DEADLINE} must be seconds above 0.", param=_DEADLINE)
    return seconds


def _band(headers: Mapping[bytes, bytes]) -> Band:
    given = headers.get(_PRIORITY_HEADER)
    if given is None:
        return Band.INTERACTIVE
    given = given.strip().lower()
    if given not in _BANDS:
        raise InvalidRequest(
            f"The header {_PRIORITY} must be interactive or batch.", param=_PRIORITY
        )
    return _BANDS[given]

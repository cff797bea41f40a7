"""Who may see the pages that generate nothing: their own key, an operator's, or anybody."""

import time
from collections.abc import Callable

from starlette.requests import Request as HttpRequest

from kvota.core.clock import Clock
from kvota.core.errors import Forbidden
from kvota.gateway.abuse import AbuseWatch
from kvota.gateway.auth import Denied, Door
from kvota.gateway.caller import Caller
from kvota.gateway.naming import request_id
from kvota.telemetry.log import Log


class Gatekeeper:
    """One per gateway. A refused look is noted by the abuse watch and the log."""

    def __init__(
        self,
        door: Door,
        abuse: AbuseWatch,
        clock: Clock,
        log: Log,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._door = door
        self._abuse = abuse
        self._clock = clock
        self._log = log
        self._unix_time = unix_time

    def admit(self, request: HttpRequest) -> Caller:
        """Raises Denied, and RateLimited for who is shut out."""
        now = self._clock.now()
        address = request.client.host if request.client else None
        self._abuse.check(now, address=address)
        try:
            caller = self._door.admit(dict(request.headers.raw), self._unix_time())
        except Denied as denied:
            self._abuse.failed(now, address=address)
            self._log.info(
                "denied",
                request_id=request_id(request.scope),
                path=request.url.path,
                why=denied.reason.value,
            )
            raise
        self._abuse.check(now, address=None, key_id=caller.key_id)
        return caller

    def require_admin(self, request: HttpRequest) -> Caller:
        """Raises Forbidden for a good key that is no operator's."""
        caller = self.admit(request)
        if not caller.is_admin:
            raise Forbidden("This needs an admin key: `kvota keys create --admin`.")
        return caller

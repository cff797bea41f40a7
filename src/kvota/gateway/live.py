"""What a reload may replace while requests run: everything that comes from the file.

A request takes `Live.now` once, when its body is here, and keeps it to its end, so it never sees
half of two settings.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from kvota.core.errors import Refusal, Refused
from kvota.edge.cutting import CutScope
from kvota.gateway.abuse import AbuseSettings
from kvota.gateway.backends import Backend
from kvota.gateway.filters.content import Filters
from kvota.gateway.input_checks import InputLimits
from kvota.gateway.policy.retries import RetrySettings
from kvota.gateway.policy.tasks import Classifier
from kvota.gateway.routes import RouteTable
from kvota.gateway.settings import GatewaySettings

RETRY_AFTER_S = 30.0  # whoever restarts a gateway needs about so long


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One state of the settings, made ready for use."""

    settings: GatewaySettings
    table: RouteTable
    filters: Filters
    classifier: Classifier
    retries: RetrySettings
    abuse: AbuseSettings

    @cached_property
    def input_limits(self) -> InputLimits:
        settings = self.settings
        return InputLimits(
            nesting_max=settings.nesting_max,
            num_messages_max=settings.messages_max,
            prompt_characters_max=settings.prompt_characters_max,
            output_tokens_max=settings.output_tokens_max,
            num_choices_max=settings.choices_max,
            num_inputs_max=settings.inputs_max,
        )


class Live:
    """The rules in force, the requests under way, and whether new ones are taken at all.

    `leaving`: backends that a reload has taken out and that still answer; it changes by itself.
    """

    def __init__(self, rules: Rules, leaving: Collection[Backend] = ()) -> None:
        self.now = rules
        self._leaving = leaving
        self.is_draining = False
        self._open: set[CutScope] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def backends(self) -> list[Backend]:
        """All that a request under way may be at, each once."""
        routes = self.now.table.routes.values()
        now = [one for route in routes for one in route.backends]
        return list(dict.fromkeys([*now, *self._leaving]))

    def serving(self) -> "_Serving":
        """A request is under way as long as the block. Raises Refused in it when it is cut."""
        return _Serving(self._open, self._is_idle)

    async def wait_idle(self) -> None:
        """Return when no request is under way."""
        await self._is_idle.wait()

    def cut(self) -> None:
        """End every request that is under way, with an error for its client."""
        for scope in self._open:
            scope.cut()


class _Serving:
    """One request's block."""

    __slots__ = ("_is_idle", "_open", "_scope")

    def __init__(self, open_: set[CutScope], is_idle: asyncio.Event) -> None:
        self._open = open_
        self._is_idle = is_idle
        self._scope = CutScope()

    async def __aenter__(self) -> None:
        self._open.add(self._scope)
        self._is_idle.clear()
        self._scope.begin()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.discard(self._scope)
        if not self._open:
            self._is_idle.set()
        if self._scope.end(kind):
            raise going_away() from None


def going_away() -> Refused:
    return Refused(Refusal.DRAINING, "The server is shutting down.", retry_after_s=RETRY_AFTER_S)

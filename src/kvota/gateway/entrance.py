"""Everything that may turn a request away before any backend hears of it, in this order:

    address blocked? ─▶ key ─▶ key blocked?            without its body
      ─▶ model known, and allowed ─▶ sizes ─▶ limits ─▶ content filter      with it

`Entry.leave` is the other side: what was reserved is corrected once it is known what was used.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError, Outcome, Refusal, Refused
from kvota.edge.problems import RawHeaders
from kvota.gateway.abuse import AbuseWatch
from kvota.gateway.attempts import Asked, Body
from kvota.gateway.auth import Denied, Door, model_not_found
from kvota.gateway.caller import ANONYMOUS_ID, Caller
from kvota.gateway.calls import Call
from kvota.gateway.filters.content import FilterFound
from kvota.gateway.input_checks import check_input
from kvota.gateway.limits import Admission, KeyLimitReached, RateLimits
from kvota.gateway.live import Rules
from kvota.gateway.policy.tasks import Prompt
from kvota.gateway.routes import Route, RouteTable
from kvota.gateway.settings import AUTO
from kvota.wire.openai import ChatRequest, Message

RETRY_AFTER_UNTOLD_S: Final = 5.0  # a backend that does not answer yet
_CALLERS_FAULT: Final = frozenset({Outcome.INVALID, Outcome.DENIED, Outcome.RATE_LIMITED})


class Entry:
    """A request that was let in. `headers` tell its client where it stands with its limits."""

    def __init__(self, route: Route, admission: Admission) -> None:
        self.route = route
        self._admission = admission
        self.headers: RawHeaders = admission.standing.headers()

    async def leave(self, call: Call) -> None:
        """Correct what was reserved: nothing for what the service refused, else what was used."""
        if call.is_owed:
            await self._admission.settle(call.prompt_tokens + call.output_tokens)
        else:
            await self._admission.withdraw()

    async def refuse(self) -> None:
        """For what is its client's fault: it was asked, though nothing was used."""
        await self._admission.settle(0)


class Entrance:
    """One per gateway."""

    def __init__(
        self,
        door: Door,
        limits: RateLimits,
        abuse: AbuseWatch,
        clock: Clock,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._door = door
        self._limits = limits
        self._abuse = abuse
        self._clock = clock
        self._unix_time = unix_time

    def admit(self, headers: Mapping[bytes, bytes], call: Call) -> Caller:
        """Whose request it is. Raises Denied, and RateLimited for who is shut out."""
        now = self._clock.now()
        self._abuse.check(now, address=call.address)
        try:
            caller = self._door.admit(headers, self._unix_time())
        except Denied as denied:
            call.why = denied.reason.value
            raise
        call.caller = caller
        self._abuse.check(now, address=None, key_id=caller.key_id)
        return caller

    async def enter(
        self, asked: Asked, call: Call, rules: Rules, check: Callable[[Body], None]
    ) -> Entry:
        """Raises FilterFound, ModelNotFound, ModelNotAllowed, KeyLimitReached, InvalidRequest.

        `check` raises for a body that is wrong whatever its model is.
        """
        route = self._route(asked, call, rules, check)
        check_input(asked.body, rules.input_limits, asked.content)
        tokens = 0
        if not _is_unlimited(asked.caller):
            tokens = _estimated_tokens(asked, rules.settings.output_tokens_assumed)
        entry = await self.reserve(asked.caller, route, tokens)
        await self.search(asked.body, call, rules, entry)
        return entry

    def check_route(self, route: Route, caller: Caller, call: Call) -> None:
        """Raises ModelNotAllowed, or ModelNotFound where models hide."""
        call.model = route.name  # first: what was refused is in the log by its name
        self._door.check_model(caller, *route.names)

    async def search(self, body: msgspec.Struct, call: Call, rules: Rules, entry: Entry) -> None:
        """The content filter on all that a body says. Raises FilterFound, InvalidRequest.

        After the limits, which so hold for the work of searching as well.
        """
        try:
            rules.filters.check_request(body)
        except BaseException as error:
            if isinstance(error, FilterFound):
                call.why = error.rule
            await entry.refuse()
            raise

    async def reserve(
        self, caller: Caller, route: Route, tokens: int, *, field: str = "max_tokens"
    ) -> Entry:
        """Take the tokens from the key's limits. Raises as `RateLimits.enter`."""
        name, *aliases = route.names
        admission = await self._limits.enter(caller, name, tokens, aliases=aliases, field=field)
        return Entry(route, admission)

    def _route(
        self, asked: Asked, call: Call, rules: Rules, check: Callable[[Body], None]
    ) -> Route:
        name, table = asked.body.model, rules.table
        route = table.find(name) if name else None
        if name == AUTO and table.has_tasks:
            call.task = rules.classifier.classify(prompt_of(asked.body)).task
            route = table.for_task(call.task, asked.caller)
        if route is None:
            check(asked.body)  # a node says this first
            raise not_here(name or "", table)
        self.check_route(route, asked.caller, call)
        return route

    def note_end(self, call: Call) -> None:
        """Tell the abuse watch of a request that its caller should have known better than send."""
        is_anybody = call.caller is not None and call.caller.key_id == ANONYMOUS_ID
        if call.outcome not in _CALLERS_FAULT or is_anybody:
            return  # an open door is on this machine alone, whose users may do what they want
        key_id = call.caller.key_id if call.caller is not None else None
        self._abuse.failed(self._clock.now(), address=call.address, key_id=key_id)


def not_here(name: str, table: RouteTable) -> KvotaError:
    """What is said of a model that nobody has, as far as is known now."""
    if not table.untold:
        return model_not_found(name)
    return Refused(
        Refusal.ENGINE_RESTARTING,
        f"No backend has said that it has the model {name[:256]}, and {', '.join(table.untold)} "
        "has not been reached yet.",
        retry_after_s=RETRY_AFTER_UNTOLD_S,
    )


def standing_headers(error: KvotaError) -> RawHeaders:
    """Where the caller stands with its limits, for an answer that says they are reached."""
    return error.standing.headers() if isinstance(error, KeyLimitReached) else []


def prompt_of(body: Body) -> Prompt:
    """The texts of a request that say what it is about."""
    if not isinstance(body, ChatRequest):
        return Prompt((body.prompt,) if isinstance(body.prompt, str) else ())
    messages = body.messages or []
    turns = tuple(text_of(one) for one in messages if one.role == "user")
    system = "\n".join(text_of(one) for one in messages if one.role in ("system", "developer"))
    return Prompt(turns, system)


def texts_of(body: Body) -> list[str]:
    """All that a prompt says, in its order."""
    if isinstance(body, ChatRequest):
        return [text_of(one) for one in body.messages or []]
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    return [one for one in given if isinstance(one, str)]


def text_of(message: Message) -> str:
    content = message.content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _estimated_tokens(asked: Asked, output_assumed: int) -> int:
    output = output_assumed if asked.max_tokens is None else asked.max_tokens
    return asked.estimated_prompt_tokens + asked.num_choices * output


def _is_unlimited(caller: Caller) -> bool:
    return caller.limits.is_unlimited and not caller.model_limits

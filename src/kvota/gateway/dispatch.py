"""Which backend answers, and which one next when the first did not.

    route ─▶ over its threshold? ─▶ the next model of its chain
      ─▶ a replica: attempt ─▶ failed, and nothing was sent ─▶ another replica ─▶ the next model

Attempts share one budget (`policy/retries.py`), and once a byte of content went out there is no
other attempt. Every attempt ends its breaker's permit, and is seen by outlier watch and rollout.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import (
    BackendFailed,
    KvotaError,
    ModelNotFound,
    Refusal,
    Refused,
    RequestTimeout,
)
from kvota.edge.exchange import Exchange
from kvota.edge.problems import RawHeaders
from kvota.gateway.attempts import NotOffered, verdict_of
from kvota.gateway.backends import Backend
from kvota.gateway.calls import Call
from kvota.gateway.live import Rules
from kvota.gateway.node_passage import PassedOn
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain
from kvota.gateway.policy.retries import (
    Attempts,
    Blame,
    Failure,
    RetryBudget,
    RetrySettings,
    blame,
    failure_of_status,
)
from kvota.gateway.policy.watch import Verdict
from kvota.gateway.question import Question
from kvota.gateway.routes import LATENCY_SMOOTHING, Route, Target
from kvota.gateway.upstream.failures import AttemptFailed

CONVERSATION: Final = b"x-kvota-conversation"  # what belongs together, for affinity and rollout
RETRY_AFTER_UNHEALTHY_S: Final = 5.0
GOOD_FOR_S: Final = 30.0  # since its latest answer: what it does not know may be one model alone
_CONVERSATION_LENGTH_MAX: Final = 256
_FORBIDDEN: Final = frozenset({402, 403})  # also what one request costs, or says


class Ended(msgspec.Struct, frozen=True):
    """An attempt has ended. For metrics."""

    backend: str
    failure: Failure | None  # None: it went well


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all attempts of one request."""

    sticky_key: str
    ticket_tokens: int
    prefix: PrefixChain
    conversation: str | None


class Dispatcher:
    """One per gateway. `on_attempt` and `on_rollback` hear of what happened."""

    def __init__(
        self,
        clock: Clock,
        retries: RetrySettings,
        *,
        on_attempt: Callable[[Ended], None],
        on_rollback: Callable[[str, Verdict], None],
    ) -> None:
        self._clock = clock
        self.budget = RetryBudget(retries)
        self._on_attempt = on_attempt
        self._on_rollback = on_rollback

    async def answer(
        self, route: Route, asked: Question, exchange: Exchange, call: Call, rules: Rules
    ) -> None:
        """Get the answer from somewhere. Raises what the client is told when nobody has one."""
        now = self._clock.now()
        self.budget.note_request(now)
        attempts = Attempts(rules.retries, self.budget, asked.arrival.deadline_s)
        chain, why = _chain(route, asked, rules, now)
        wanted = _wanted(route, asked, call)
        standing = list(exchange.headers)
        error: KvotaError | None = None
        for num_behind, one in zip(reversed(range(len(chain))), chain, strict=True):
            if one is not route and why is None:
                why = _why_not(error)
            while (target := self._pick(one, wanted, attempts)) is not None:
                _note_target(call, target, route, why)
                exchange.headers = [*standing, *_told(call, target)]
                error = await self._attempt(target, asked, exchange, call, rules, attempts)
                if error is None:
                    return
                if isinstance(error, Refused) and attempts.num_left <= num_behind:
                    break  # full: what is left is for the models behind
        raise nobody(chain, now) if error is None else _naming(error, attempts.tried)

    def _pick(self, route: Route, wanted: _Wanted, attempts: Attempts) -> Target | None:
        now = self._clock.now()
        target = route.pick(
            now,
            sticky_key=wanted.sticky_key,
            ticket_tokens=wanted.ticket_tokens,
            prefix=wanted.prefix,
            conversation=wanted.conversation,
            tried=attempts.tried,
        )
        if not attempts.tried:
            verdict = route.turned_away(wanted.sticky_key, target, now)
            if verdict is not None and verdict.rolls_back:
                self._on_rollback(route.name, verdict)
        return target

    async def _attempt(
        self,
        target: Target,
        asked: Question,
        exchange: Exchange,
        call: Call,
        rules: Rules,
        attempts: Attempts,
    ) -> KvotaError | None:
        """None: the client has its answer. An error: another attempt may be made.

        Raises when this was the last one.
        """
        attempts.begin(target.backend.name)
        call.sent_s = began_s = self._clock.now()
        call.first_token_s = call.last_token_s = None  # of an attempt whose answer nobody has seen
        call.output_tokens = 0
        attempt = asked.attempt(target, call, exchange, self._clock, rules)
        try:
            await attempt.run()
        except KvotaError as error:
            failure = verdict_of(error)
            self._judge(target, failure, error, call, began_s, content_sent=attempt.has_sent)
            if failure is None:
                raise
            has_sent = attempt.has_sent or exchange.is_gone
            told = _last(error, target, has_sent=has_sent)
            if attempts.after(failure, content_sent=has_sent, now=self._clock.now()) is not None:
                raise _naming(told, attempts.tried) from error
            return told
        except BaseException:  # cancelled, or a bug: says nothing of the backend, and is raised on
            target.backend.breaker.withdraw(target.permit, self._clock.now())
            raise
        self._judge(target, None, None, call, began_s)
        return None

    def _judge(
        self,
        target: Target,
        failure: Failure | None,
        error: KvotaError | None,
        call: Call,
        began_s: float,
        *,
        content_sent: bool = False,
    ) -> None:
        """Tell breaker, outlier watch and rollout how it went."""
        now, backend = self._clock.now(), target.backend
        says = Blame.NOTHING
        if failure is not None:
            says = blame(failure, content_sent=content_sent)
        is_own_fault = says in (Blame.FAILED, Blame.SHUT) or isinstance(
            error, RequestTimeout | NotOffered
        )
        if failure is None and error is None:
            backend.breaker.report(target.permit, True, now)
            backend.answered_s = now
        elif says is Blame.FAILED and backend.supervised is None:
            backend.breaker.report(target.permit, False, now)
        else:
            backend.breaker.withdraw(target.permit, now)
            hold_s = _hold_s(failure, error, backend, now)
            if hold_s is not None:
                backend.breaker.hold(now + hold_s, now, is_fault=says is Blame.SHUT)
        self._on_attempt(Ended(backend.name, failure))
        if error is None or is_own_fault:
            self._observe(target, error is None, call, began_s, now)

    def _observe(self, target: Target, ok: bool, call: Call, began_s: float, now: float) -> None:
        ttft_s = None if call.first_token_s is None else call.first_token_s - began_s
        backend, route = target.backend, target.route
        if ttft_s is not None:
            old = backend.latency_s or ttft_s
            backend.latency_s = old + LATENCY_SMOOTHING * (ttft_s - old)
        version = route.versions[target.version]
        version.outliers.observe(backend.name, ok, call.time_per_output_token_s, now)
        verdict = route.rollout.observe(target.version, ok, ttft_s, now)
        if verdict.rolls_back:
            self._on_rollback(route.name, verdict)


def _chain(
    route: Route, asked: Question, rules: Rules, now: float
) -> tuple[tuple[Route, ...], str | None]:
    """The models that may answer, in order, and why the first one is not the one asked for.

    A model over its threshold is passed over as long as one behind it is not.
    """
    if route.entry.fallback is None or not asked.may_fall_back:
        return (route,), None
    chain = tuple(
        one for one in rules.table.chain(route) if one is route or asked.caller.may_use(*one.names)
    )
    for at, one in enumerate(chain):
        why = one.why_over(now)
        if why is None:
            return chain[at:], None if at == 0 else route.why_over(now)
    return chain, None


def _wanted(route: Route, asked: Question, call: Call) -> _Wanted:
    given = asked.client_headers.get(CONVERSATION, b"")[:_CONVERSATION_LENGTH_MAX]
    conversation = f"{asked.caller.tenant}/{given.decode('utf-8', 'replace')}" if given else None
    key = asked.caller.key_id
    sticky_key = conversation or (call.id if key == "anonymous" else key)
    return _Wanted(
        sticky_key=sticky_key,
        ticket_tokens=asked.ticket_tokens,
        prefix=asked.prefix() if route.has_choice else NO_PREFIX,
        conversation=conversation,
    )


def _note_target(call: Call, target: Target, asked_for: Route, why: str | None) -> None:
    call.num_attempts += 1
    call.backend, call.version = target.backend.name, target.version
    call.model = target.route.name
    if target.route is not asked_for:
        call.fallback = f"{asked_for.name} -> {target.route.name}: {why}"


def _why_not(error: KvotaError | None) -> str:
    """What kept a model from answering, for whoever hears of its fallback."""
    if error is None:
        return "no backend could answer"
    if isinstance(error, Refused):
        return f"its backends refused: {error.reason.value}"
    return "its backends failed"


def _told(call: Call, target: Target) -> RawHeaders:
    """Who really answers, and why not the one that was asked."""
    headers = [
        (b"x-kvota-backend", target.backend.name.encode()),
        (b"x-kvota-model", target.shown_model.encode("ascii", "replace")),
    ]
    if call.fallback is not None:
        headers.append((b"x-kvota-fallback", call.fallback.encode("ascii", "replace")))
    if call.task is not None:
        headers.append((b"x-kvota-task", call.task.encode("ascii", "replace")))
    return headers


def _hold_s(
    failure: Failure | None, error: KvotaError | None, backend: Backend, now: float
) -> float | None:
    """How long a backend wants peace, or is better left alone; None: it may be asked at once.

    A node's desk says no to one request, not to all. And what is not known in one place may be
    known in another: another path, or the other models of a backend that has just answered; nor
    need it be our key that is forbidden something, where others of its requests are answered.
    """
    is_good = now - backend.answered_s <= GOOD_FOR_S
    if failure is Failure.MISCONFIGURED:
        may_be_one_request = is_good and _status_of(error) in _FORBIDDEN
        return None if backend.supervised or may_be_one_request else RETRY_AFTER_UNHEALTHY_S
    if not isinstance(error, AttemptFailed):
        return None
    if failure is Failure.NOT_OFFERED:
        return None if is_good else RETRY_AFTER_UNHEALTHY_S
    if failure is Failure.BUSY and not backend.is_own_kind:
        return RETRY_AFTER_UNHEALTHY_S if error.retry_after_s is None else error.retry_after_s
    return None


def _status_of(error: KvotaError | None) -> int | None:
    """What the backend said."""
    if isinstance(error, AttemptFailed):
        return error.backend_status
    return error.status if isinstance(error, PassedOn) else None


def _last(error: KvotaError, target: Target, *, has_sent: bool) -> KvotaError:
    """What the client is told if there is no other attempt."""
    if isinstance(error, PassedOn) and _is_operators(error):
        name = target.backend.name
        return BackendFailed(f"The backend {name} is set up wrongly (status {error.status}).")
    if not isinstance(error, AttemptFailed):
        return error
    told, supervised = error.for_client(), target.backend.supervised
    if told is error and supervised is not None and not has_sent:
        return supervised.refusal()  # its process has died, and is being started again
    return told


def _naming(error: KvotaError, tried: Sequence[str]) -> KvotaError:
    """The same error; where several backends have failed, with all of their names."""
    if isinstance(error, BackendFailed) and len(tried) > 1:
        error.message += f" Tried: {', '.join(tried)}."
    return error


def _is_operators(error: PassedOn) -> bool:
    """A node's answer that is about our key for it, or the name that the settings give its model.

    Another 404 is about a path, which the client has chosen.
    """
    is_misconfigured = failure_of_status(error.status) is Failure.MISCONFIGURED
    return is_misconfigured or error.code == ModelNotFound.code


def nobody(chain: Sequence[Route], now: float) -> KvotaError:
    """What is said when no backend may be asked now, and when one may again."""
    backends = [one for route in chain for one in route.backends]
    for one in backends:
        if one.supervised is not None and not one.supervised.is_up:
            return one.supervised.refusal()
    waits = [one.breaker.retry_after_s(now) for one in backends if one.state.is_healthy]
    held = [wait_s for wait_s in waits if wait_s > 0]
    reason, what = Refusal.ENGINE_RESTARTING, "can take requests now"
    if held and all(_is_at_its_limit(one, now) for one in backends):
        reason, what = Refusal.QUEUE_FULL, "has room: each has asked to be left alone for a while"
    return Refused(
        reason,
        f"No backend of {chain[0].name} {what}.",
        retry_after_s=min(held) if held else RETRY_AFTER_UNHEALTHY_S,
    )


def _is_at_its_limit(backend: Backend, now: float) -> bool:
    """It has said so itself; not: it fails, or is away."""
    is_held = backend.breaker.retry_after_s(now) > 0
    return backend.may_serve and is_held and not backend.breaker.num_trips_in_row(now)

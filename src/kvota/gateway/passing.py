"""A request that a backend answers whole, without generating, and one attempt at it.

    own kind   body as it came (renamed where the node knows another name) ─▶ node_passage
    foreign    embeddings wait at a desk of their own ─▶ the answer is checked, counted, renamed

No vector goes out that may belong to another text: as many come back as texts were sent, or the
attempt has failed.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError, ModelNotFound, NotFound
from kvota.edge.arrival import Arrival
from kvota.edge.exchange import Exchange
from kvota.gateway.attempts import NotOffered, headers_to
from kvota.gateway.backends import EMBEDDING_TOKENS_UNDER_WAY
from kvota.gateway.caller import Caller
from kvota.gateway.calls import Call, Work
from kvota.gateway.live import Rules
from kvota.gateway.node_passage import PassedOn, pass_on
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.passing_kinds import Load, PassingKind
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain
from kvota.gateway.routes import Target
from kvota.gateway.upstream.connection import UpstreamReply
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind
from kvota.gateway.upstream.foreign_desk import ticket_of
from kvota.gateway.upstream.outgoing import renamed_body
from kvota.gateway.upstream.passage import COUNT_MAX
from kvota.gateway.upstream.relay import while_client_stays

# The most that one request is charged in that line, a quarter of what may be under way: a backend
# takes a large one text by text, so the largest must not wait until everybody else is done.
TICKET_TOKENS_MAX: Final = EMBEDDING_TOKENS_UNDER_WAY // 4
# A backend that does not know the path. Its chats are as good as ever, so nobody is kept from them.
_NOT_OFFERED: Final = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """A Question (`question.py`) whose answer is passed on in one piece."""

    kind: PassingKind[Any]
    content: bytes
    model: str | None  # as the client named it
    load: Load
    arrival: Arrival
    caller: Caller
    client_headers: Mapping[bytes, bytes]

    @property
    def may_fall_back(self) -> bool:
        """Never for tokens: those of another model mean nothing to who asked for this one's."""
        return self.kind.work is Work.EMBEDDING and self.caller.may_fall_back

    @property
    def ticket_tokens(self) -> int:
        return self.load.tokens

    def prefix(self) -> PrefixChain:
        """None: an encoder keeps nothing of what it has read."""
        return NO_PREFIX

    def attempt(
        self, target: Target, call: Call, exchange: Exchange, clock: Clock, rules: Rules
    ) -> "PassingAttempt":
        return PassingAttempt(target, self, call, exchange, clock)


class PassingAttempt:
    """`run` it once."""

    def __init__(
        self, target: Target, asked: Passing, call: Call, exchange: Exchange, clock: Clock
    ) -> None:
        self._target = target
        self._asked = asked
        self._call = call
        self._exchange = exchange
        self._clock = clock

    @property
    def has_sent(self) -> bool:
        return False  # an answer goes out whole, or not

    async def run(self) -> None:
        """Raises what `attempts.verdict_of` judges, and NotFound for a lookup that it has not."""
        backend = self._target.backend
        backend.num_open += 1
        try:
            async with while_client_stays(self._exchange):
                if backend.is_own_kind:
                    await self._through_node()
                else:
                    await self._through_foreign()
        except KvotaError as error:
            if _is_not_offered(error):
                raise self._not_offered(error) from error
            raise
        finally:
            backend.num_open -= 1

    async def _through_node(self) -> None:
        upstream, call, path = self._target.backend.upstream, self._call, self._asked.kind.path
        assert isinstance(upstream, NodeUpstream)
        with call.at_work():
            async with upstream.ask("POST", path, self._body(), self._headers()) as reply:
                await pass_on(reply, self._exchange, call, self._clock)
        if call.work is Work.LOOKUP:
            call.first_token_s = None  # nothing was computed that would say how fast it is

    async def _through_foreign(self) -> None:
        """The answer is taken whole before it is sent: a slow reader keeps no place in line."""
        async with self._admitted():
            with self._call.at_work():
                content = await self._answer()
        self._call.answered(self._clock.now())
        await self._exchange.send_whole(200, content)

    async def _answer(self) -> bytes:
        asked, upstream = self._asked, self._target.backend.upstream
        async with upstream.open(
            asked.kind.path, self._body(), self._headers(), deadline_s=asked.arrival.deadline_s
        ) as reply:
            content = await reply.body()
            return self._taken(content, reply) if asked.kind.work is Work.EMBEDDING else content

    def _taken(self, content: bytes, reply: UpstreamReply) -> bytes:
        """An answer with vectors, counted and under the name that the client knows."""
        call, asked = self._call, self._asked
        try:
            fields = _fields(content)
            num_vectors = len(_rows(fields.get("data", b"null")))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            what = f"answered with what is no list of vectors ({error})"
            raise reply.failure(FailureKind.MALFORMED, what) from None
        if num_vectors != asked.load.num_inputs:
            what = f"answered {asked.load.num_inputs} texts with {num_vectors} vectors"
            raise reply.failure(FailureKind.MALFORMED, what)
        call.first_token_s = call.last_token_s = self._clock.now()
        call.prompt_tokens = _tokens_said(fields.get("usage")) or call.prompt_tokens
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._target.route.name))
        return msgspec.json.encode(fields)

    def _body(self) -> bytes:
        asked, model = self._asked, self._target.model
        return asked.content if asked.model == model else renamed_body(asked.content, model=model)

    def _headers(self) -> dict[str, str]:
        return headers_to(self._target.backend, self._asked, self._call)

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """A place in the line that the gateway keeps for a backend without one of its own."""
        asked, desk = self._asked, self._target.backend.embedding_desk
        if desk is None or asked.kind.work is not Work.EMBEDDING:
            yield
            return
        tokens = min(asked.load.tokens, TICKET_TOKENS_MAX)
        ticket = ticket_of(
            asked.caller, asked.arrival, model=self._target.model, prompt_tokens=tokens,
            max_tokens=1,
        )  # fmt: skip
        async with desk.admitted(ticket, asked.arrival.client_id) as place:
            self._call.queued_s = place.queued_s
            queued_ms = b"%d" % round(1000 * place.queued_s)
            self._exchange.headers.append((b"x-kvota-queue-ms", queued_ms))
            yield
            place.produced(0, 1, is_done=True)

    def _not_offered(self, error: KvotaError) -> NotFound:
        name, path = self._target.route.name, self._asked.kind.path
        # Where there is no tokenizer to ask, the model itself may be as good as any.
        is_lookup = self._asked.kind.work is Work.LOOKUP
        what = NotFound if is_lookup else NotOffered
        return what(f"{name} is not served at {path}. {error.message}", param="model")


def _is_not_offered(error: KvotaError) -> bool:
    if isinstance(error, PassedOn):
        return error.status in _NOT_OFFERED and error.code != ModelNotFound.code
    return isinstance(error, AttemptFailed) and error.backend_status in _NOT_OFFERED


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


def _tokens_said(usage: msgspec.Raw | None) -> int | None:
    """The backend's own count, unless it makes no sense."""
    try:
        said = _usage(usage or b"null")
    except msgspec.MsgspecError:
        return None
    return said.prompt_tokens if said is not None and 0 < said.prompt_tokens <= COUNT_MAX else None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_rows = msgspec.json.Decoder(list[msgspec.Raw]).decode
_usage = msgspec.json.Decoder(_Usage | None).decode

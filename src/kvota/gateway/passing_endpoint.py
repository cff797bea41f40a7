"""The endpoints that generate nothing: embeddings, and the tokenizer by itself.

    door ─▶ body ─▶ model ─▶ sizes ─▶ limits ─▶ filter ─▶ attempt · attempt · … ─▶ end, exactly once

The same steps as for generation (`proxy.py`), with a body of another kind.
"""

from typing import Any

from kvota.core.errors import InvalidRequest, KvotaError
from kvota.edge.exchange import Exchange
from kvota.gateway.caller import Caller
from kvota.gateway.calls import Call, Work
from kvota.gateway.entrance import Entry, not_here, standing_headers
from kvota.gateway.live import Rules
from kvota.gateway.passing import Passing
from kvota.gateway.passing_kinds import Load, PassingKind
from kvota.gateway.proxy import Endpoint, Parts
from kvota.gateway.routes import Route


class PassingEndpoint(Endpoint):
    """One path of one kind."""

    def __init__(self, kind: PassingKind[Any], parts: Parts) -> None:
        super().__init__(kind.name, parts, kind.work)
        self._kind = kind

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        parts = self._parts
        caller, arrival, content = await self._let_in(exchange, call)
        rules = parts.live.now  # not before: a reload may come while a body does
        async with exchange.watched():
            body = self._kind.decoder.decode(content)
            route = self._route(body.model, caller, rules)
            parts.entrance.check_route(route, caller, call)
            load = self._kind.weigh(body, rules.input_limits)
            call.prompt_tokens, call.num_inputs = load.tokens, load.num_inputs
            asked = Passing(
                kind=self._kind, content=content, model=body.model, load=load, arrival=arrival,
                caller=caller, client_headers=exchange.request_headers,
            )  # fmt: skip
            entry = await self._enter(route, caller, load, exchange)
            await parts.entrance.search(body, call, rules, entry)
            try:
                await parts.dispatcher.answer(route, asked, exchange, call, rules)
            finally:
                await entry.leave(call)

    def _route(self, name: str | None, caller: Caller, rules: Rules) -> Route:
        """The model that is asked; a tokenizer without a name is that of the first own node."""
        if name:
            route = rules.table.find(name)
            if route is None:
                raise not_here(name, rules.table)
            return route
        if self._kind.work is Work.LOOKUP:
            for route in rules.table.routes.values():
                has_own = any(one.is_own_kind for one in route.backends)
                if has_own and caller.may_use(*route.names):
                    return route
        raise InvalidRequest("`model` is missing.", param="model")

    async def _enter(self, route: Route, caller: Caller, load: Load, exchange: Exchange) -> Entry:
        try:
            entry = await self._parts.entrance.reserve(
                caller, route, load.tokens, field=self._kind.field
            )
        except KvotaError as error:
            exchange.headers += standing_headers(error)
            raise
        exchange.headers += entry.headers
        return entry

"""What every kind of request looks like to whoever chooses the backends that are asked.

    Question   whose it is, when it is due, what it weighs, and how to ask one backend
    Try        one backend being asked: it ends with the client's answer, or raises

Generation (`attempts.py`) and embeddings (`embedding.py`) are questions; the dispatcher knows no
more of them than this.
"""

from collections.abc import Mapping
from typing import Protocol

from kvota.core.clock import Clock
from kvota.edge.arrival import Arrival
from kvota.edge.exchange import Exchange
from kvota.gateway.caller import Caller
from kvota.gateway.calls import Call
from kvota.gateway.live import Rules
from kvota.gateway.policy.affinity import PrefixChain
from kvota.gateway.routes import Target


class Try(Protocol):
    @property
    def has_sent(self) -> bool:
        """The client has a part of the answer's content: nobody else may begin it anew."""

    async def run(self) -> None:
        """Raises what `attempts.verdict_of` judges, and whatever is the request's own fault."""


class Question(Protocol):
    @property
    def arrival(self) -> Arrival: ...

    @property
    def caller(self) -> Caller: ...

    @property
    def client_headers(self) -> Mapping[bytes, bytes]: ...

    @property
    def may_fall_back(self) -> bool:
        """Another model may answer, where the settings name one."""

    @property
    def ticket_tokens(self) -> int:
        """A price that only compares replicas."""

    def prefix(self) -> PrefixChain:
        """What it may have in common with others whose KV is kept somewhere."""

    def attempt(
        self, target: Target, call: Call, exchange: Exchange, clock: Clock, rules: Rules
    ) -> Try: ...

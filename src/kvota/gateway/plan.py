"""Everything a gateway is told when it starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvota.edge.settings import EdgeSettings
from kvota.gateway.control import Settings
from kvota.gateway.own_node import NodePlan
from kvota.gateway.settings import Fleet, GatewaySettings
from kvota.gateway.upstream.counting import OpenTokenizer, no_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """`read` gives the settings that may change while it runs, anew. Raises ConfigError."""

    host: str
    port: int
    drain_timeout_s: float
    edge: EdgeSettings
    gateway: GatewaySettings
    fleet: Fleet
    read: Callable[[], Settings]
    environment: Mapping[str, str]
    node: NodePlan | None = None  # None: this gateway starts no node
    trace_endpoint: str | None = None  # OTLP over HTTP
    open_tokenizer: OpenTokenizer = no_tokenizer

"""From the settings of one process to the plan of a gateway, and of the node that it starts."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvota.cli_settings import ReadSettings
from kvota.config import ENVIRONMENT_PREFIX, Config
from kvota.core.errors import ConfigError
from kvota.edge.settings import EdgeSettings
from kvota.gateway.node_life import Bounds
from kvota.gateway.own_node import NodePlan
from kvota.gateway.plan import ServePlan
from kvota.gateway.serve import run as run_gateway
from kvota.gateway.settings import Fleet, GatewaySettings
from kvota.gateway.upstream.counting import ChatTokenizer
from kvota.sizing.memory import parse_size

ANSWER_GRACE_S: Final = 30.0  # beyond the node's own limit, before the gateway gives up on it
SILENCE_MIN_S: Final = 60.0
NODE_SECTIONS: Final = ("model", "engine", "desk", "embeddings", "server")


def run(read: ReadSettings, node: NodePlan | None) -> int:
    """Serve until told to stop. Returns the exit status; raises StartupError before listening."""
    settings = read()
    server = settings.server
    if server.unix_socket is not None:
        raise ConfigError("unix_socket is for `kvota node`; a gateway listens on host and port.")

    def reread() -> tuple[GatewaySettings, Fleet]:
        fresh = read()
        return fresh.gateway, fresh.fleet

    return run_gateway(
        ServePlan(
            host=server.host,
            port=server.port,
            drain_timeout_s=server.drain_timeout_s,
            edge=EdgeSettings(
                max_body_bytes=server.max_body_bytes,
                queue_timeout_s=settings.desk.queue_timeout_s,
                request_timeout_s=settings.desk.request_timeout_s,
                heartbeat_s=server.heartbeat_s,
                send_timeout_s=server.send_timeout_s,
                cors_origins=server.cors_origins,
            ),
            gateway=settings.gateway,
            fleet=settings.fleet,
            read=reread,
            environment=os.environ,
            node=node,
            trace_endpoint=server.trace_endpoint,
            open_tokenizer=_open_tokenizer,
        )
    )


def _open_tokenizer(path: str) -> ChatTokenizer:
    # Imported here: most gateways price prompts without one, and it costs memory.
    from kvota.prompt_tokenizer import open_tokenizer

    return open_tokenizer(path)


def node_plan(settings: Config) -> NodePlan:
    """The node that `kvota serve` starts, with a file of the settings as they are."""

    def command(directory: Path, socket: Path) -> Sequence[str]:
        file = directory / "node.toml"
        file.write_text(node_toml(settings, socket), "utf-8")
        return (sys.executable, "-m", "kvota.child", str(file))

    server, own = settings.server, settings.gateway
    return NodePlan(
        command=command,
        environment=_without_settings(os.environ),
        bounds=Bounds(
            silent_patience_s=own.node_silent_s,
            drain_timeout_s=server.drain_timeout_s,
        ),
        growth_bytes_max=parse_size(own.node_growth_max, "node_growth_max"),
        answer_timeout_s=settings.desk.request_timeout_s + ANSWER_GRACE_S,
        silence_max_s=max(SILENCE_MIN_S, 3 * server.heartbeat_s),
    )


def node_toml(settings: Config, socket: Path) -> str:
    """The node's settings as a file, so that whoever looks can see what it was told."""
    lines = []
    for section in NODE_SECTIONS:
        values = msgspec.to_builtins(getattr(settings, section))
        if section == "server":
            values |= {"unix_socket": str(socket), "cors_origins": []}
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(v)}" for name, v in values.items() if v is not None]
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    """JSON is TOML, except for tables, and for a control character that JSON lets stand."""
    if isinstance(value, dict):
        rows = (f"{json.dumps(name)} = {_toml(one)}" for name, one in value.items())
        return f"{{{', '.join(rows)}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The node reads its file alone."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX)
    }

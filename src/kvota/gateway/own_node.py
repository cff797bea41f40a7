"""The engine process that `kvota serve` starts: its address, its process, and it as a backend.

our node       <private directory>/node.sock; only this user can enter the directory (0700)
vllm serve     a port of this machine that was free; the gateway keeps its desk
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType

from kvota.core.clock import Clock
from kvota.edge.settings import EdgeSettings
from kvota.gateway.backends import Backend, new_backend, upstream_settings
from kvota.gateway.desk_metrics import DeskMetrics
from kvota.gateway.node_life import Bounds, Reason
from kvota.gateway.node_probe import NodeProbe
from kvota.gateway.node_upstream import NodeUpstream
from kvota.gateway.settings import OWN_NODE, BackendEntry
from kvota.gateway.supervisor import Child, Supervisor
from kvota.gateway.upstream.connection import Upstream
from kvota.gateway.upstream.kinds import TRAITS, BackendKind
from kvota.telemetry.log import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What to start. `command` makes the command line, given the private directory and socket.

    Times are seconds. `answer_timeout_s`: longer than any answer of the node takes. `url`: where
    an engine of another kind listens, instead of on the socket.
    """

    command: Callable[[Path, Path], Sequence[str]]
    environment: Mapping[str, str]
    bounds: Bounds
    growth_bytes_max: int | None
    answer_timeout_s: float
    silence_max_s: float  # between two pieces of a stream
    kind: BackendKind = BackendKind.KVOTA
    url: str | None = None
    # Of the desk that the gateway keeps for an engine of another kind.
    max_running_requests: int = 64
    max_waiting_queue: int = 256


class OwnNode(AbstractContextManager["OwnNode"]):
    """The parts of a supervised node. Leaving the block removes its directory."""

    def __init__(
        self, plan: NodePlan, clock: Clock, log: Log, chance: Random,
        on_down: Callable[[Reason], None], metrics: DeskMetrics, limits: EdgeSettings,
    ) -> None:  # fmt: skip
        """`metrics` hear of the desk, where the gateway keeps one for the engine; `limits` are
        those of every request.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="kvota-"))  # 0700
        socket = self._directory / "node.sock"
        is_ours = plan.kind is BackendKind.KVOTA
        url = plan.url or "http://node"
        self.probe = NodeProbe(socket if is_ours else None, url + TRAITS[plan.kind].health_path)
        child = Child(
            command=plan.command(self._directory, socket),
            environment=plan.environment,
            probe=self.probe.look,
            announces=is_ours,
        )
        self.supervisor = Supervisor(
            child, plan.bounds, clock, log,
            growth_bytes_max=plan.growth_bytes_max, on_down=on_down,
        )  # fmt: skip
        entry = BackendEntry(
            name=OWN_NODE,
            url=url,
            unix_socket=str(socket) if is_ours else None,
            kind=plan.kind,
            connections_max=4096,
            first_byte_timeout_s=plan.answer_timeout_s,
            idle_timeout_s=plan.silence_max_s,
            max_running_requests=plan.max_running_requests,
            max_waiting_queue=plan.max_waiting_queue,
        )
        client = NodeUpstream if is_ours else Upstream
        upstream = client(upstream_settings(entry, os.environ), clock)
        self.backend: Backend = new_backend(
            entry, upstream, clock, chance, self.supervisor,
            records=None if is_ours else metrics.of(OWN_NODE), limits=limits,
        )  # fmt: skip

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

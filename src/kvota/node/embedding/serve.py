"""The composition root of a node that embeds.

bind ─▶ resolve ─▶ load ─▶ line ─▶ application ─▶ listen
"""

import asyncio
import contextlib
import dataclasses
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import uvloop
from starlette.types import ASGIApp

from kvota.core.clock import SystemClock
from kvota.desk.batching import BatchLine, BatchSettings
from kvota.edge.listening import http_server, stop_signals
from kvota.edge.supervision import watch_lifeline
from kvota.model.catalog import KNOWN_MODELS, expanded, resolve
from kvota.model.encoder import load_encoder
from kvota.model.encoder_source import is_encoder
from kvota.node.embedding.app import EmbeddingRecord, ServedEncoder, create_embedding_app
from kvota.node.embedding.embedder import Embedder
from kvota.node.embedding.tracing import times_of
from kvota.node.options import (
    DeskOptions,
    EmbeddingOptions,
    ModelSettings,
    ServerSettings,
    http_settings,
)
from kvota.node.startup import Startup
from kvota.sizing.memory import resident_bytes
from kvota.telemetry.embedding_metrics import EmbeddingMetrics
from kvota.telemetry.log import Log, new_log
from kvota.telemetry.trace import TraceContext, Tracing

EXIT_OK = 0


@dataclass(frozen=True, slots=True)
class EmbeddingNode:
    """The parts of a node that is ready to run."""

    name: str
    max_len: int
    app: ASGIApp
    embedder: Embedder


def embeds(model: str) -> bool:
    """Whether a MODEL argument means a text encoder."""
    known = KNOWN_MODELS.get(model)
    return bool(known.beside) if known is not None else is_encoder(expanded(model))


def load_embedding_node(
    screen: Startup,
    model: ModelSettings,
    desk: DeskOptions,
    batches: EmbeddingOptions,
    server: ServerSettings,
    cache_dir: Path,
    *,
    tracing: Tracing | None,
    log_requests: bool,
) -> EmbeddingNode:
    """Fetch, load and put together, telling the operator what is going on."""
    with screen.fetching() as fetching:
        path = resolve(model.model, cache_dir, fetching)
    before_bytes = resident_bytes()
    encoder = load_encoder(path, num_threads=model.threads)
    name = model.served_name or (model.model if model.model in KNOWN_MODELS else path.name)
    screen.show_encoder(name, path, encoder, num_bytes=max(0, resident_bytes() - before_bytes))
    clock, log = SystemClock(), new_log(sys.stderr)
    line = BatchLine(
        BatchSettings(
            max_batch_tokens=batches.max_batch_tokens,
            max_batch_texts=batches.max_batch_texts,
            max_wait_s=batches.max_wait_ms / 1000,
            max_waiting_tokens=batches.max_waiting_tokens,
        )
    )
    metrics = EmbeddingMetrics(model=name, waiting=lambda: (line.num_waiting, line.waiting_tokens))
    embedder = Embedder(encoder.embed, line, clock, _Passes(metrics, log))
    app = create_embedding_app(
        served=ServedEncoder(
            name=name,
            created=int(path.stat().st_mtime),
            max_len=encoder.max_len,
            num_dimensions=encoder.num_dimensions,
            vocab_size=encoder.vocab_size,
            encode=encoder.encode,
        ),
        embedder=embedder,
        settings=http_settings(server, desk),
        clock=clock,
        chance=SystemRandom(),
        record=_Records(metrics, log if log_requests else None, tracing),
        render_metrics=metrics.render,
        unix_time=time.time,
        stuck_after_s=server.stuck_after_s,
    )
    return EmbeddingNode(name, encoder.max_len, app, embedder)


def serve_embeddings(
    node: EmbeddingNode, taken: socket.socket, *, drain_timeout_s: float, supervised: bool
) -> int:
    """Answer on `taken` until told to stop. Returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(_serve(node, taken, drain_timeout_s, supervised))


async def _serve(
    node: EmbeddingNode, taken: socket.socket, drain_timeout_s: float, supervised: bool
) -> int:
    server, stop = http_server(node.app), stop_signals()
    if supervised:
        watch_lifeline(stop)
    listening = asyncio.create_task(server.serve(sockets=[taken]))
    told = asyncio.create_task(stop.wait())
    await asyncio.wait({told, listening}, return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(node.embedder.drain(max(1.0, drain_timeout_s)), drain_timeout_s)
    server.should_exit = True
    await listening
    told.cancel()
    return EXIT_OK


class _Passes:
    """What the embedder tells of its passes, into metrics and, when one fails, into the log."""

    def __init__(self, metrics: EmbeddingMetrics, log: Log) -> None:
        self._log = log
        self.observe_pass = metrics.observe_pass
        self.observe_wait = metrics.observe_wait

    def observe_failure(self, error: Exception) -> None:
        self._log.error("pass failed", exc_info=error)


class _Records:
    """Observations of every request; a trace and a log line of it where they are wanted."""

    def __init__(self, metrics: EmbeddingMetrics, log: Log | None, tracing: Tracing | None) -> None:
        self._metrics = metrics
        self._log = log
        self._tracing = tracing
        self._chance = SystemRandom()

    def __call__(self, record: EmbeddingRecord) -> None:
        self._metrics.observe_request(record.outcome, record.code, record.total_s)
        if self._tracing is not None:
            context = TraceContext.begin(record.traceparent, self._chance)
            self._tracing.record(times_of(record, time.time()), context)
        if self._log is None:
            return
        fields = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(record).items()
            if value is not None
        }
        self._log.info("request", endpoint="embeddings", **fields)

"""The composition root of `kvota node`: reading it is reading how a node is put together.

    bind ─▶ resolve ─▶ load ─▶ bill ─▶ engine ─▶ application ─▶ listen

Whatever can be wrong is found before the last step, so a server that listens works.
"""

import asyncio
import dataclasses
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, TextIO

import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from kvota.core.clock import Clock, SystemClock
from kvota.core.errors import ConfigError
from kvota.core.plan import Executor
from kvota.desk.desk import Desk
from kvota.desk.entry import lane_of
from kvota.desk.forecast import Forecast
from kvota.edge.collector import spare_what_stays
from kvota.edge.listening import bind, bind_unix, listen
from kvota.edge.liveness import gone_after_s
from kvota.edge.supervision import NodeReady, announce
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Mailbox
from kvota.engine.text import Vocabulary
from kvota.formats.gguf_parts import model_name
from kvota.kv.cache import KVCache
from kvota.model.catalog import resolve
from kvota.model.load import LoadedModel, load_model
from kvota.model.sampler import Sampler
from kvota.node.app import create_app
from kvota.node.comeback import Comeback, process_age_s
from kvota.node.desk_admin import DeskAdmin
from kvota.node.embedding.serve import embeds, load_embedding_node, serve_embeddings
from kvota.node.options import (
    DeskOptions,
    EmbeddingOptions,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    desk_settings,
    http_settings,
)
from kvota.node.ports import RecordRequest, RequestRecord
from kvota.node.pricing import ticket_of
from kvota.node.priority import giving_way
from kvota.node.readiness import stall_log
from kvota.node.runner import EngineRunner
from kvota.node.served import ServedModel
from kvota.node.server import serve
from kvota.node.startup import Startup
from kvota.node.tool_dialect import ToolDialect
from kvota.node.tracing import TracedRecords
from kvota.node.where import desk_gauges
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sizing.memory import MemoryBill, draw_bill, memory_limit, parse_size, resident_bytes
from kvota.telemetry.log import Log, new_log
from kvota.telemetry.metrics import Metrics
from kvota.telemetry.steps import RecordingExecutor
from kvota.telemetry.trace import Tracing, new_tracing

_ENCODER_RESERVE_BYTES = 500 * 2**20  # for batches, which hold nothing between passes


def run(
    model: ModelSettings,
    engine: EngineSettings,
    desk: DeskOptions,
    server: ServerSettings,
    cache_dir: Path,
    *,
    embeddings: EmbeddingOptions = EmbeddingOptions(),  # noqa: B008 - frozen
    supervised: bool = False,
) -> int:
    """Serve until told to stop. Returns the exit status; raises StartupError before listening.

    `supervised`: a gateway has started this process. It is told on standard output when the node
    listens, and the node ends when standard input does.
    """
    screen = Startup(Console(stderr=True, highlight=False))
    if embeds(model.model):
        return _run_encoder(screen, model, desk, embeddings, server, cache_dir, supervised)
    with ExitStack() as closing, _bind(server) as taken:
        steps = _steps_file(engine.record_steps, closing)
        node, ready = _load_node(
            screen, model, engine, desk, server, cache_dir, steps,
            tracing=_tracing(server, closing), log_requests=not supervised,
        )  # fmt: skip
        spare_what_stays()
        listen(taken)
        _tell(screen, taken, server, ready if supervised else None)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(
                serve(
                    node.app,
                    taken,
                    node.runner,
                    node.engine,
                    drain_timeout_s=server.drain_timeout_s,
                    supervised=supervised,
                )
            )


def _run_encoder(
    screen: Startup,
    model: ModelSettings,
    desk: DeskOptions,
    embeddings: EmbeddingOptions,
    server: ServerSettings,
    cache_dir: Path,
    supervised: bool,
) -> int:
    with ExitStack() as closing:
        taken = closing.enter_context(_bind(server))
        node = load_embedding_node(
            screen, model, desk, embeddings, server, cache_dir,
            tracing=_tracing(server, closing), log_requests=not supervised,
        )  # fmt: skip
        spare_what_stays()
        listen(taken)
        ready = NodeReady(
            model=node.name,
            max_model_len=node.max_len,
            kv_tokens=0,
            planned_bytes=resident_bytes() + _ENCODER_RESERVE_BYTES,
        )
        _tell(screen, taken, server, ready if supervised else None)
        return serve_embeddings(
            node, taken, drain_timeout_s=server.drain_timeout_s, supervised=supervised
        )


def _tell(
    screen: Startup, taken: socket.socket, server: ServerSettings, ready: NodeReady | None
) -> None:
    """Where the node listens: to the gateway that started it, or to the operator."""
    if ready is not None:
        announce(ready)
    elif server.unix_socket is not None:
        screen.show_socket(server.unix_socket)
    else:
        screen.show_address(*taken.getsockname()[:2])


def _bind(server: ServerSettings) -> socket.socket:
    if server.unix_socket is not None:
        return bind_unix(Path(server.unix_socket))
    return bind(server.host, server.port, gone_after_s=gone_after_s(server.send_timeout_s))


def _load_node(
    screen: Startup,
    model: ModelSettings,
    engine: EngineSettings,
    desk: DeskOptions,
    server: ServerSettings,
    cache_dir: Path,
    steps: TextIO | None,
    *,
    tracing: Tracing | None,
    log_requests: bool,
) -> tuple["Node", NodeReady]:
    """Fetch, load, weigh and put together, telling the operator what is going on."""
    clock = SystemClock()
    began_s = clock.now()
    with screen.fetching() as fetching:
        path = resolve(model.model, cache_dir, fetching)
    fetching_s = clock.now() - began_s
    before_bytes = resident_bytes()
    with screen.loading() as loading:
        loaded = giving_way(
            partial(
                load_model,
                path,
                weights=model.weights,
                kv_dtype=model.kv_cache_dtype,
                num_threads=model.threads,
                max_model_len=model.max_model_len,
                pass_tokens_max=engine.max_num_batched_tokens,
                progress=loading,
            )
        )
    bill = _bill(loaded, model, engine, weights_bytes=resident_bytes() - before_bytes)
    served = _served(loaded, bill, model.served_name or _name_of(model.model, path), path)
    screen.show_model(served.name, path, loaded)
    screen.show_bill(bill)
    sampler = Sampler(loaded.compiled.vocab_size, num_sampled=loaded.num_sampled)
    executor: Executor = loaded.compiled.executor(bill.num_blocks, sampler)
    if steps is not None:
        executor = RecordingExecutor(executor, clock, steps)
    node = build_node(
        served,
        executor,
        Vocabulary(loaded.tokenizer.pieces, loaded.hidden_ids),
        engine,
        desk,
        server,
        clock=clock,
        log=new_log(sys.stderr),
        load_s=process_age_s() - fetching_s,  # the next process finds the model fetched
        tracing=tracing,
        log_requests=log_requests,
    )
    return node, _ready(served, bill)


def _tracing(server: ServerSettings, closing: ExitStack) -> Tracing | None:
    tracing = new_tracing(server.trace_endpoint, service="kvota-node")
    if tracing is not None:
        closing.callback(tracing.close)
    return tracing


def _steps_file(path: str | None, open_files: ExitStack) -> TextIO | None:
    if path is None:
        return None
    try:
        return open_files.enter_context(Path(path).open("w"))
    except OSError as error:
        raise ConfigError(f"record_steps: cannot write {path}: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of a node that is ready to run."""

    app: ASGIApp
    runner: EngineRunner
    engine: Engine


def build_node(
    served: ServedModel,
    executor: Executor,
    vocabulary: Vocabulary,
    engine_settings: EngineSettings,
    desk_options: DeskOptions,
    server_settings: ServerSettings,
    *,
    clock: Clock,
    log: Log,
    load_s: float,
    tracing: Tracing | None = None,
    log_requests: bool = True,
) -> Node:
    """Put engine, thread border and application together. Starts nothing.

    `load_s` is how long it takes to get here from the start of a process with the model at hand.
    `log_requests` is false behind a gateway, which writes the one line of each request.
    """
    mailbox, capacity = Mailbox(), executor.capacity
    cache = KVCache(
        capacity.num_blocks,
        capacity.block_size,
        namespace=served.name,
        prefix_cache=engine_settings.prefix_cache,
    )
    metrics = Metrics(
        model=served.name,
        gauges=lambda: engine.gauges,
        desk=lambda: desk_gauges(desk.snapshot(), desk.settings, capacity.block_size),
    )
    desk = Desk(
        capacity.num_blocks * capacity.block_size,
        desk_settings(desk_options, engine_settings.max_running_requests),
        Forecast(),
        block_size=capacity.block_size,
        observer=metrics,
    )
    comeback = Comeback(clock, load_s=load_s, drain_timeout_s=server_settings.drain_timeout_s)
    runner = EngineRunner(
        clock,
        mailbox,
        desk,
        lambda request: ticket_of(request, cache, model=served.name),
        num_running_max=engine_settings.max_running_requests,
        stuck_after_s=server_settings.stuck_after_s,
        report_crash=lambda crash: log.critical("engine died", exc_info=crash),
        comeback=comeback,
        model=served.name,
    )
    engine = Engine(
        executor,
        Scheduler(cache, _limits(engine_settings)),
        vocabulary=vocabulary,
        clock=clock,
        mailbox=mailbox,
        publish=runner.publish,
        observer=_Steps(metrics, log),
    )
    app = create_app(
        served=lambda: served,
        runner=runner,
        settings=http_settings(server_settings, desk_options),
        clock=clock,
        comeback=comeback,
        record=_record(metrics, log if log_requests else None, tracing),
        render_metrics=metrics.render,
        chance=SystemRandom(),
        lane_of=lambda request: lane_of(len(request.prompt), desk.settings).value,
        report_stall=stall_log(log),
        desk=DeskAdmin(
            lambda: desk.settings,
            runner.reconfigure,
            running_max=engine_settings.max_running_requests,
        ),
    )
    return Node(app, runner, engine)


class _Steps:
    """What the engine tells of its steps, into metrics and, when a step fails, into the log."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._log = log
        self._metrics = metrics
        self.observe_step = metrics.observe_step

    def observe_failure(self, error: Exception) -> None:
        self._metrics.observe_failure()
        self._log.error("step failed", exc_info=error)


def _record(metrics: Metrics, log: Log | None, tracing: Tracing | None) -> RecordRequest:
    """What is kept of every request: observations, and where they are wanted a line and a trace."""
    sinks: list[RecordRequest] = [metrics.observe_request]
    if log is not None:
        sinks.append(lambda record: log.info("request", **_rounded(dataclasses.asdict(record))))
    if tracing is not None:
        sinks.append(TracedRecords(tracing, SystemRandom(), time.time))

    def record(ended: RequestRecord) -> None:
        for sink in sinks:
            sink(ended)

    return record


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Times to tenths of a millisecond; absent ones left out."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


def _served(loaded: LoadedModel, bill: MemoryBill, name: str, path: Path) -> ServedModel:
    tokenizer = loaded.tokenizer
    return ServedModel(
        name=name,
        created=int(path.stat().st_mtime),
        max_model_len=bill.max_model_len,
        vocab_size=loaded.num_sampled,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        hidden_ids=loaded.hidden_ids,
        template=loaded.template,
        grammar=loaded.grammar,
        tooling=ToolDialect(loaded.tool_format, tokenizer, loaded.grammar, SystemRandom()),
    )


def _ready(served: ServedModel, bill: MemoryBill) -> NodeReady:
    return NodeReady(
        model=served.name,
        max_model_len=served.max_model_len,
        kv_tokens=bill.num_tokens,
        planned_bytes=bill.used_bytes + bill.kv_budget_bytes + bill.reserve_bytes,
    )


def _bill(
    loaded: LoadedModel, model: ModelSettings, engine: EngineSettings, *, weights_bytes: int
) -> MemoryBill:
    limit_bytes, limit_from = memory_limit()
    compiled = loaded.compiled
    fixed = engine.kv_memory
    return draw_bill(
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        used_bytes=resident_bytes(),
        weights_bytes=max(0, weights_bytes),
        kv_budget_ratio=engine.kv_budget_ratio,
        kv_memory_bytes=parse_size(fixed, "kv_memory") if fixed is not None else None,
        block_size=compiled.block_size,
        bytes_per_block=compiled.bytes_per_block,
        max_model_len=model.max_model_len or loaded.max_position,
    )


def _limits(settings: EngineSettings) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_running_requests=settings.max_running_requests,
        long_prefill_share=settings.long_prefill_share,
        speculative_tokens=settings.speculative_tokens,
    )


def _name_of(model: str, path: Path) -> str:
    """How clients call a model that was given no name: the known name, or the file's."""
    if Path(model) == path or "/" in model:
        return model_name(path) if path.is_file() else path.resolve().name
    return model

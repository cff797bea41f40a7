"""An embedding node without a model: its application, with passes that are in the test's hands."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette

from kvota.core.clock import SystemClock
from kvota.desk.batching import BatchLine, BatchSettings
from kvota.node.embedding.app import EmbeddingRecord, ServedEncoder, create_embedding_app
from kvota.node.embedding.embedder import Embedder
from kvota.node.settings import HttpSettings
from kvota.telemetry.embedding_metrics import EmbeddingMetrics
from tests.support.asgi_caller import Caller

MODEL = "tiny-encoder"
VOCAB = 300
POISON = 299
PATH = "/v1/embeddings"
PATIENCE_S = 60.0


@dataclass
class Passes:
    """Vectors that name their text: [first token, number of tokens]. A closed gate holds passes."""

    batches: list[list[list[int]]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def embed(self, texts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        self.batches.append([list(text) for text in texts])
        self.begun.release()
        assert self.gate.wait(PATIENCE_S)
        if any(POISON in text for text in texts):
            raise RuntimeError("a poisoned token")
        return np.array([[text[0], len(text)] for text in texts], np.float32)


class Observer(EmbeddingMetrics):
    failures: int = 0

    def observe_failure(self, error: Exception) -> None:
        self.failures += 1


@dataclass
class EmbeddingNode:
    app: Starlette
    caller: Caller
    passes: Passes
    records: list[EmbeddingRecord]
    embedder: Embedder
    observer: Observer
    line: BatchLine

    async def post(self, given: Any, **fields: Any) -> Any:
        return await self.caller.request("POST", PATH, {"model": MODEL, "input": given, **fields})

    async def in_line(self, num_texts: int) -> None:
        """Until so many texts wait."""
        async with asyncio.timeout(PATIENCE_S):
            while self.line.num_waiting != num_texts:  # noqa: ASYNC110 - it is pure: no events
                await asyncio.sleep(0)

    async def begun(self) -> None:
        """Until a pass has begun that this was not called for yet."""
        assert await asyncio.to_thread(self.passes.begun.acquire, timeout=PATIENCE_S)


@asynccontextmanager
async def embedding_node(
    *, is_open: bool = True, line: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[EmbeddingNode]:
    passes, records = Passes(), list[EmbeddingRecord]()
    if is_open:
        passes.gate.set()
    batches = BatchLine(BatchSettings(**{"max_wait_s": 0.0, **(line or {})}))
    clock = SystemClock()
    observer = Observer(model=MODEL, waiting=lambda: (batches.num_waiting, batches.waiting_tokens))
    embedder = Embedder(passes.embed, batches, clock, observer)
    app = create_embedding_app(
        served=ServedEncoder(
            name=MODEL, created=1, max_len=16, num_dimensions=2, vocab_size=VOCAB,
            encode=lambda text: [len(word) for word in text.split()],
        ),
        embedder=embedder,
        settings=HttpSettings(**settings),
        clock=clock,
        chance=Random(1),
        record=records.append,
        render_metrics=observer.render,
        unix_time=lambda: 1.0,
        stuck_after_s=30.0,
    )  # fmt: skip
    async with living(app):
        try:
            yield EmbeddingNode(app, Caller(app), passes, records, embedder, observer, batches)
        finally:
            passes.gate.set()


@asynccontextmanager
async def living(app: Starlette) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        yield

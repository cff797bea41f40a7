"""The HTTP application of a node that embeds.

/v1/embeddings             intake ▸ line ▸ batch ▸ vectors
/v1/models  /health  /ready  /metrics
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvota.core.clock import Clock
from kvota.core.errors import (
    ClientClosed,
    InvalidRequest,
    KvotaError,
    ModelNotFound,
    Outcome,
    Refusal,
    Refused,
)
from kvota.edge.application import application
from kvota.edge.arrival import Arrival, Arrivals, client_id, id_headers
from kvota.edge.exchange import Exchange
from kvota.edge.problems import error_code, error_headers, error_response, forget_frames, outcome_of
from kvota.edge.trust import USAGE, UsageReport
from kvota.node.embedding.embedder import Embedder, Vector
from kvota.node.embedding.texts import Encode, token_ids
from kvota.node.settings import HttpSettings
from kvota.node.workbench import Seat, Workbench
from kvota.wire.decode import BodyDecoder
from kvota.wire.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    inputs_of,
)
from kvota.wire.responses import ModelCard, ModelList


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEncoder:
    """One encoder under one name."""

    name: str
    created: int  # unix seconds
    max_len: int  # tokens of one text
    num_dimensions: int
    vocab_size: int
    encode: Encode


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRecord:
    """What is kept of one request. Exactly one per request.

    Seconds from its arrival, None where it did not get so far: to the end of the door, to the
    first pass with a text of it, to its last vector.
    """

    request_id: str
    model: str
    tenant: str
    outcome: Outcome
    status: int
    code: str | None
    num_texts: int
    prompt_tokens: int
    total_s: float
    door_s: float | None = None
    queued_s: float | None = None
    computed_s: float | None = None
    traceparent: str | None = None  # of whoever sent it


RecordEmbedding = Callable[[EmbeddingRecord], None]


def create_embedding_app(
    *,
    served: ServedEncoder,
    embedder: Embedder,
    settings: HttpSettings,
    clock: Clock,
    chance: Random,
    record: RecordEmbedding,
    render_metrics: Callable[[], bytes],
    unix_time: Callable[[], float],
    stuck_after_s: float,
) -> Starlette:
    """The application. `record` is called exactly once for each request to /v1/embeddings."""
    bench = Workbench(settings.prompt_threads, settings.waiting_body_bytes_max)
    endpoint = EmbeddingEndpoint(
        served, embedder, settings, clock, Arrivals(settings, clock, unix_time, chance), chance,
        record, bench,
    )  # fmt: skip
    about = _About(served, embedder, render_metrics, stuck_after_s)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        embedder.start()
        yield
        await embedder.stop()
        bench.close()

    routes = [
        Route("/v1/embeddings", endpoint, methods=["POST"]),
        Route("/v1/models", about.models, methods=["GET"]),
        Route("/v1/models/{id:path}", about.model, methods=["GET"]),
        Route("/health", about.health, methods=["GET"]),
        Route("/ready", about.ready, methods=["GET"]),
        Route("/metrics", about.metrics, methods=["GET"]),
    ]
    return application(routes, chance, cors_origins=settings.cors_origins, lifespan=lifespan)


class EmbeddingEndpoint:
    """An ASGI application for /v1/embeddings."""

    def __init__(
        self,
        served: ServedEncoder,
        embedder: Embedder,
        settings: HttpSettings,
        clock: Clock,
        arrivals: Arrivals,
        chance: Random,
        record: RecordEmbedding,
        bench: Workbench,
    ) -> None:
        self._served = served
        self._embedder = embedder
        self._settings = settings
        self._clock = clock
        self._arrivals = arrivals
        self._chance = chance
        self._record = record
        self._bench = bench
        self._decoder = BodyDecoder(EmbeddingRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings)
        id_, began_s = self._arrivals.new_id(), self._clock.now()
        name = client_id(exchange.request_headers) or id_
        exchange.headers += id_headers(name)
        seen = _Seen(began_s)
        failure: BaseException | None = None
        try:
            seen.arrival = self._arrivals.make(id_, began_s, exchange.request_headers)
            await self._serve(exchange, seen.arrival, seen)
        except KvotaError as error:
            failure = error
            if not exchange.is_gone:
                headers = error_headers(error, self._chance)
                with contextlib.suppress(ClientClosed):
                    await exchange.respond(error.status, error_response(error), headers)
            forget_frames(error)
        except BaseException as error:  # noted for the record, handled by whoever runs us
            failure = error
            raise
        finally:
            sent_by = exchange.request_headers.get(b"traceparent", b"").decode("latin-1") or None
            self._record(self._kept(name, seen, failure, sent_by))

    async def _serve(self, exchange: Exchange, arrival: Arrival, seen: "_Seen") -> None:
        content = await exchange.body()
        body = self._decoder.decode(content)
        texts = await self._texts(body, self._bench.seat(len(content)))
        seen.num_texts, seen.prompt_tokens = len(texts), sum(map(len, texts))
        seen.queued_at_s = self._clock.now()
        async with exchange.watched():
            work = asyncio.ensure_future(
                self._embedder.embed(
                    texts,
                    queue_deadline_s=arrival.queue_deadline_s,
                    deadline_s=arrival.deadline_s,
                    on_pass=seen.note_pass,
                )
            )
            exchange.on_gone = work.cancel  # type: ignore[assignment]
            try:
                vectors = await work
            except asyncio.CancelledError:
                if exchange.is_gone:
                    raise ClientClosed("The client went away before its answer.") from None
                raise
            finally:
                work.cancel()
            seen.computed_at_s = self._clock.now()
            exchange.headers.append((b"x-kvota-queue-ms", b"%d" % round(1000 * seen.waited_s)))
            if self._settings.trusts_gateway:
                report = UsageReport(seen.prompt_tokens, 0, 0)
                exchange.headers.append((USAGE, report.encode()))
            await exchange.respond(200, self._answer(body, vectors, seen.prompt_tokens))

    async def _texts(self, body: EmbeddingRequest, bench: Seat) -> list[Sequence[int]]:
        served = self._served
        if body.model is None:
            raise InvalidRequest("`model` is missing.", param="model")
        if body.model != served.name:
            raise ModelNotFound(
                f"The model `{body.model[:128]}` does not exist here. This server has "
                f"`{served.name}`.",
                param="model",
            )
        if body.dimensions not in (None, served.num_dimensions):
            raise InvalidRequest(
                f"`dimensions` must be {served.num_dimensions}: vectors of this model cannot be "
                "shortened.",
                param="dimensions",
            )
        inputs = inputs_of(body.input)

        def encoded() -> list[Sequence[int]]:
            return token_ids(
                inputs, served.encode, vocab_size=served.vocab_size, max_len=served.max_len
            )

        num_characters = sum(len(one) for one in inputs)
        if num_characters <= self._settings.inline_characters_max:
            return encoded()
        limit_s = self._settings.prompt_timeout_s
        return await bench.run(encoded, limit_s=limit_s, what="tokenizing", param="input")

    def _answer(
        self, body: EmbeddingRequest, vectors: Sequence[Vector], num_tokens: int
    ) -> EmbeddingResponse:
        is_packed = body.encoding_format == "base64"
        return EmbeddingResponse(
            data=[
                Embedding(index=number, embedding=_packed(one) if is_packed else one.tolist())
                for number, one in enumerate(vectors)
            ],
            model=self._served.name,
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )

    def _kept(
        self, name: str, seen: "_Seen", failure: BaseException | None, sent_by: str | None
    ) -> EmbeddingRecord:
        status, code, outcome = 200, None, Outcome.COMPLETED
        if isinstance(failure, KvotaError):
            status, code, outcome = failure.status, error_code(failure), outcome_of(failure)
            if isinstance(failure, ClientClosed):
                outcome = Outcome.CLIENT_CLOSED
        elif isinstance(failure, asyncio.CancelledError):
            status, code, outcome = 499, "shutdown", Outcome.SHUTDOWN
        elif failure is not None:
            status, code, outcome = KvotaError.status, KvotaError.code, Outcome.ENGINE_ERROR
        return EmbeddingRecord(
            request_id=name,
            model=self._served.name,
            tenant=seen.arrival.tenant if seen.arrival else "unknown",
            outcome=outcome,
            status=status,
            code=code,
            num_texts=seen.num_texts,
            prompt_tokens=seen.prompt_tokens,
            total_s=self._clock.now() - seen.began_s,
            door_s=seen.since(seen.queued_at_s),
            queued_s=seen.since(seen.begun_at_s),
            computed_s=seen.since(seen.computed_at_s),
            traceparent=sent_by,
        )


@dataclass(slots=True)
class _Seen:
    """What was learnt of a request before it ended. Times: clock seconds."""

    began_s: float
    arrival: Arrival | None = None
    num_texts: int = 0
    prompt_tokens: int = 0
    queued_at_s: float | None = None
    begun_at_s: float | None = None
    computed_at_s: float | None = None

    def note_pass(self, now: float) -> None:
        """A pass with a text of it begins: the first one counts."""
        if self.begun_at_s is None:
            self.begun_at_s = now

    @property
    def waited_s(self) -> float:
        """In line, for its first pass."""
        if self.queued_at_s is None or self.begun_at_s is None:
            return 0.0
        return self.begun_at_s - self.queued_at_s

    def since(self, moment_s: float | None) -> float | None:
        """From its arrival."""
        return None if moment_s is None else moment_s - self.began_s


class _About:
    """The GET paths."""

    def __init__(
        self,
        served: ServedEncoder,
        embedder: Embedder,
        render_metrics: Callable[[], bytes],
        stuck_after_s: float,
    ) -> None:
        self._served = served
        self._embedder = embedder
        self._render_metrics = render_metrics
        self._stuck_after_s = stuck_after_s

    async def models(self, request: HttpRequest) -> Response:
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: HttpRequest) -> Response:
        name: str = request.path_params["id"]
        if name != self._served.name:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist here.", param="model")
        return _json(self._card())

    async def health(self, request: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        if self._embedder.is_draining:
            raise Refused(Refusal.DRAINING, "The server is shutting down.", retry_after_s=5.0)
        if self._embedder.stalled_s() > self._stuck_after_s:
            message = "Work waits and the model makes no progress."
            raise Refused(Refusal.ENGINE_RESTARTING, message, retry_after_s=5.0)
        return _json({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(
            self._render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _card(self) -> ModelCard:
        served = self._served
        return ModelCard(id=served.name, created=served.created, max_model_len=served.max_len)


def _packed(vector: Vector) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode("ascii")


def _json(body: msgspec.Struct | dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

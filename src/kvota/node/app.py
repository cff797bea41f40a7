"""The node's HTTP application: every path, and what answers it.

    /v1/chat/completions  /v1/completions      generating.py: intake ▸ engine ▸ stream or body
    /tokenize  /detokenize  /tokenizer_info    the tokenizer by itself
    /v1/models  /v1/models/{id}
    /v1/requests  /admin/requests              where every request is, and DELETE to end one
    /admin/desk                                the desk's limits, to read and to change
    /health  /ready  /metrics                  alive · will accept work · Prometheus

Reading `create_app` is reading how the parts are put together; nothing else in `node/` builds one.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError
from kvota.core.request import Request
from kvota.edge.application import Lifespan, application
from kvota.edge.arrival import Arrivals
from kvota.edge.exchange import Exchange
from kvota.edge.problems import error_headers, error_response
from kvota.node.about import About
from kvota.node.comeback import Comeback
from kvota.node.desk_admin import DeskAdmin, desk_routes
from kvota.node.generating import Edge, GeneratingEndpoint
from kvota.node.intake import Intake
from kvota.node.live_requests import LiveRequests
from kvota.node.ports import RecordRequest, RenderMetrics, Runner
from kvota.node.readiness import Progress, ReportStall, tell_nobody
from kvota.node.served import ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.texts import Texts
from kvota.node.workbench import Workbench
from kvota.wire.decode import BodyDecoder
from kvota.wire.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

T = TypeVar("T", bound=msgspec.Struct)


def create_app(
    *,
    served: Callable[[], ServedModel],
    runner: Runner,
    settings: HttpSettings,
    clock: Clock,
    comeback: Comeback,
    record: RecordRequest,
    render_metrics: RenderMetrics,
    chance: Random,
    unix_time: Callable[[], float] = time.time,
    lane_of: Callable[[Request], str] = lambda _: "short",
    report_stall: ReportStall = tell_nobody,
    desk: DeskAdmin | None = None,
) -> Starlette:
    """The application of one node.

    `served` gives the model, or raises Refused while it loads; `comeback` is the runner's. `record`
    is called exactly once for each request to a generating path, whatever becomes of it;
    `report_stall` when a probe of /ready finds the engine stuck, and when one finds that it moves.
    Without `desk` there is no /admin/desk.
    """
    bench = Workbench(settings.prompt_threads, settings.waiting_body_bytes_max)
    intake = Intake(served, settings, bench, chance)
    edge = Edge(
        runner=runner,
        settings=settings,
        clock=clock,
        chance=chance,
        arrivals=Arrivals(settings, clock, unix_time, chance),
        record=record,
        lane_of=lane_of,
    )
    texts = Texts(intake, settings, bench)
    progress = Progress(runner, clock, report_stall)
    about = About(served, runner, progress, comeback, render_metrics)
    routes = [
        *_engine_routes(intake, edge),
        *_text_routes(texts, edge),
        *_about_routes(about),
        *_request_routes(LiveRequests(runner, trusts_gateway=settings.trusts_gateway)),
        *(desk_routes(desk, settings, chance) if desk is not None else ()),
    ]
    return application(routes, chance, cors_origins=settings.cors_origins, lifespan=_closing(bench))


def _engine_routes(intake: Intake, edge: Edge) -> list[Route]:
    chat = GeneratingEndpoint("chat.completions", ChatRequest, intake.chat, edge)
    completions = GeneratingEndpoint("completions", CompletionRequest, intake.completion, edge)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]


def _text_routes(texts: Texts, edge: Edge) -> list[Route]:
    tokenize = JsonEndpoint(TokenizeRequest, texts.tokenize, edge)
    detokenize = JsonEndpoint(DetokenizeRequest, texts.detokenize, edge)
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _about_routes(about: About) -> list[Route]:
    return [
        Route("/tokenizer_info", about.tokenizer_info, methods=["GET"]),
        Route("/v1/models", about.models, methods=["GET"]),
        Route("/v1/models/{id:path}", about.model, methods=["GET"]),
        Route("/health", about.health, methods=["GET"]),
        Route("/ready", about.ready, methods=["GET"]),
        Route("/metrics", about.metrics, methods=["GET"]),
    ]


def _request_routes(live: LiveRequests) -> list[Route]:
    return [
        Route("/v1/requests", live.list_own, methods=["GET"]),
        Route("/v1/requests/{id:path}", live.delete_own, methods=["DELETE"]),
        Route("/admin/requests", live.list_all, methods=["GET"]),
        Route("/admin/requests/{id:path}", live.delete, methods=["DELETE"]),
    ]


class JsonEndpoint(Generic[T]):
    """An ASGI application for one path: a JSON body in, a JSON body out, no engine.

    `answer` takes what the body says, and how many bytes it has.
    """

    def __init__(
        self, kind: type[T], answer: Callable[[T, int], Awaitable[msgspec.Struct]], edge: Edge
    ) -> None:
        self._decoder = BodyDecoder(kind)
        self._answer = answer
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._edge.settings)
        try:
            content = await exchange.body()
            answer = await self._answer(self._decoder.decode(content), len(content))
            await exchange.respond(200, answer)
        except KvotaError as error:
            if not exchange.is_gone:
                headers = error_headers(error, self._edge.chance)
                await exchange.respond(error.status, error_response(error), headers)


def _closing(bench: Workbench) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        bench.close()

    return lifespan

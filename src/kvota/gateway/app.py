"""The gateway's HTTP application: every path, and what answers it.

    /v1/chat/completions  /v1/completions      proxy.py: door ▸ route ▸ attempts
    /v1/embeddings  /tokenize  /detokenize     passing_endpoint.py: the same, answered whole
    /v1/models  /v1/models/{id}                what the caller may ask for
    /v1/requests  /admin/requests              where every request is, and DELETE to end one
    /admin/usage /admin/backends /admin/rollouts /admin/reload
    /admin/desk                                passages.py: the limits of a node's desk
    /health  /ready  /metrics                  alive · will accept work · Prometheus

Parts are made in serve.py and put together here.
"""

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from kvota.core.errors import KvotaError
from kvota.edge.problems import ErrorPages
from kvota.gateway.about import About
from kvota.gateway.admin import Admin
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.naming import NamedAnswers
from kvota.gateway.passages import LiveRequests, NodeDesks
from kvota.gateway.passing_endpoint import PassingEndpoint
from kvota.gateway.passing_kinds import DETOKENIZE, EMBEDDINGS, TOKENIZE
from kvota.gateway.proxy import GatewayEndpoint, Parts
from kvota.wire.openai import ChatRequest, CompletionRequest

_EXPOSED = [
    "retry-after",
    "x-should-retry",
    "x-kvota-request-id",
    "x-kvota-queue-ms",
    "x-kvota-cached-tokens",
    "x-kvota-backend",
    "x-kvota-model",
    "x-kvota-fallback",
    "x-kvota-task",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What answers the paths that generate nothing."""

    about: About
    admin: Admin
    requests: LiveRequests
    gatekeeper: Gatekeeper


def create_app(parts: Parts, pages: Pages) -> ASGIApp:
    problems = ErrorPages(parts.chance)
    recorded = [*_generating_routes(parts), *_passing_routes(parts)]
    app = Starlette(
        routes=[
            *recorded,
            *_about_routes(pages.about),
            *_request_routes(pages.requests),
            Route("/tokenizer_info", pages.requests.tokenizer_info, methods=["GET"]),
            *_admin_routes(pages.admin),
            _desk_route(parts, pages),
        ],
        middleware=_middleware(parts.settings.cors_origins),
        exception_handlers={
            HTTPException: problems.http,
            KvotaError: problems.known,
            Exception: problems.crash,
        },
    )
    app.router.redirect_slashes = False
    endpoints = {one.path: one.endpoint for one in recorded}
    is_direct = not parts.settings.cors_origins
    return NamedAnswers(app, parts.arrivals.new_id, endpoints, is_direct=is_direct)


def _generating_routes(parts: Parts) -> list[Route]:
    chat = GatewayEndpoint("chat.completions", "/v1/chat/completions", ChatRequest, parts)
    completions = GatewayEndpoint("completions", "/v1/completions", CompletionRequest, parts)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]


def _passing_routes(parts: Parts) -> list[Route]:
    kinds = (EMBEDDINGS, TOKENIZE, DETOKENIZE)
    return [Route(kind.path, PassingEndpoint(kind, parts), methods=["POST"]) for kind in kinds]


def _about_routes(about: About) -> list[Route]:
    return [
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


def _admin_routes(admin: Admin) -> list[Route]:
    return [
        Route("/admin/usage", admin.usage, methods=["GET"]),
        Route("/admin/backends", admin.backends, methods=["GET"]),
        Route("/admin/rollouts", admin.rollouts, methods=["GET"]),
        Route("/admin/rollouts/{model:path}", admin.change_rollout, methods=["POST"]),
        Route("/admin/reload", admin.reload, methods=["POST"]),
    ]


def _desk_route(parts: Parts, pages: Pages) -> Route:
    desks = NodeDesks(parts.live, pages.gatekeeper)
    return Route("/admin/desk", desks.pass_on, methods=["GET", "PUT"])


def _middleware(cors_origins: tuple[str, ...]) -> list[Middleware]:
    """CORS only where the operator allows pages of other origins to call."""
    if not cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    ]

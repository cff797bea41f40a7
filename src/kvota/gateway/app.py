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

from starlette.routing import Route
from starlette.types import ASGIApp

from kvota.edge.application import application
from kvota.gateway.about import About
from kvota.gateway.admin import Admin
from kvota.gateway.gatekeeper import Gatekeeper
from kvota.gateway.naming import NamedAnswers
from kvota.gateway.passages import LiveRequests, NodeDesks
from kvota.gateway.passing_endpoint import PassingEndpoint
from kvota.gateway.passing_kinds import DETOKENIZE, EMBEDDINGS, TOKENIZE
from kvota.gateway.proxy import GatewayEndpoint, Parts
from kvota.wire.openai import ChatRequest, CompletionRequest

_EXPOSED = ("x-kvota-backend", "x-kvota-model", "x-kvota-fallback", "x-kvota-task")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What answers the paths that generate nothing."""

    about: About
    admin: Admin
    requests: LiveRequests
    gatekeeper: Gatekeeper


def create_app(parts: Parts, pages: Pages) -> ASGIApp:
    recorded = [*_generating_routes(parts), *_passing_routes(parts)]
    routes = [
        *recorded,
        *_about_routes(pages.about),
        *_request_routes(pages.requests),
        Route("/tokenizer_info", pages.requests.tokenizer_info, methods=["GET"]),
        *_admin_routes(pages.admin),
        _desk_route(parts, pages),
    ]
    cors_origins = parts.settings.cors_origins
    app = application(routes, parts.chance, cors_origins=cors_origins, exposed=_EXPOSED)
    endpoints = {one.path: one.endpoint for one in recorded}
    is_direct = not cors_origins
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

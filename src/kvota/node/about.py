"""What a node says of itself, without work for the engine: models, health, metrics."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.node.comeback import Comeback
from kvota.node.ports import RenderMetrics, Runner, RunnerState
from kvota.node.readiness import Progress
from kvota.node.served import ServedModel
from kvota.wire.responses import ModelCard, ModelList


class About:
    """The GET paths. `served` may raise Refused while the model loads."""

    def __init__(
        self, served: Callable[[], ServedModel], runner: Runner, progress: Progress,
        comeback: Comeback, render_metrics: RenderMetrics,
    ) -> None:  # fmt: skip
        self._served = served
        self._runner = runner
        self._progress = progress
        self._comeback = comeback
        self._render_metrics = render_metrics

    async def models(self, request: HttpRequest) -> Response:
        model = self._served()
        cards = [_card(model, name) for name in (model.name, *model.aliases)]
        return _json(ModelList(data=cards))

    async def model(self, request: HttpRequest) -> Response:
        model = self._served()
        name: str = request.path_params["id"]
        model.require(name)
        return _json(_card(model, name))

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        return _json(self._served().tokenizer.describe())

    async def health(self, request: HttpRequest) -> Response:
        """The process is alive; says nothing else on purpose."""
        return _json({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Whether new work would be accepted. Raises Refused with the reason."""
        state = self._runner.state
        if state is not RunnerState.RUNNING:
            raise self._comeback.refusal(state)
        self._served()
        if self._progress.is_stuck():
            raise self._comeback.restart("Work waits and the engine makes no progress.")
        return _json({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(
            self._render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, max_model_len=model.max_model_len)


def _json(body: msgspec.Struct | Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

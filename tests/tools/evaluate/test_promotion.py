"""The gate from end to end: two versions behind a gateway, evaluated, and promoted or not.

    kvota evaluate v1 v2 ─▶ evaluate.json ─▶ kvota rollout promote --require ─▶ gateway

Nodes with a stage instead of a model; everything else is what operators run.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvota.cli import app
from kvota.gateway.settings import BackendEntry, ModelEntry, VersionEntry
from kvota.gateway.upstream.kinds import BackendKind
from kvota.tools.evaluate.result import NotProven
from tests.support.gateway_node import LiveGateway
from tests.support.live_node import MODEL, LiveNode, live_node
from tests.support.stage import babble, says

BODY = "The lines of this text are read by both servers, word after word.\n" * 24


class Fleet:
    """A model `chat` with versions v1, which is stable, and v2."""

    def __init__(self, v1: LiveNode, v2: LiveNode, gateway: LiveGateway, folder: Path) -> None:
        self.v1, self.v2, self.gateway = v1, v2, gateway
        self.result = folder / "evaluate.json"
        self._text = folder / "own.txt"
        self._text.write_text(BODY)

    def evaluate(self, *nodes: LiveNode) -> Result:
        places = [f"{MODEL}@{node.url}" for node in nodes or (self.v1, self.v2)]
        flags = ["--text", str(self._text), "--max-tokens", "4", "--min-agreement", "0.9"]
        out = ["--out", str(self.result.with_suffix(""))]
        return CliRunner().invoke(app, ["evaluate", *places, *flags, *out])

    def promote(self, model: str = "chat", version: str = "v2") -> Result:
        flags = ["--require", str(self.result), "--url", self.gateway.url]
        return CliRunner().invoke(app, ["rollout", "promote", model, version, *flags])

    @property
    def stable(self) -> str:
        told = httpx.get(f"{self.gateway.url}/admin/rollouts", trust_env=False, timeout=60).json()
        return str(told["data"][0]["stable"])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as closing:
        old, new = closing.enter_context(live_node()), closing.enter_context(live_node())
        entries = [
            BackendEntry(name=name, url=node.url, kind=BackendKind.KVOTA)
            for name, node in (("a", old), ("b", new))
        ]
        versions = tuple(
            VersionEntry(name=name, backends=(backend,), served_as=MODEL, weight=weight)
            for name, backend, weight in (("v1", "a", 0.9), ("v2", "b", 0.1))
        )
        gateway = LiveGateway(
            *entries, models=(ModelEntry(name="chat", aliases=("alias",), versions=versions),)
        )
        closing.callback(gateway.stop)
        yield Fleet(old, new, gateway, tmp_path)


def test_a_version_is_promoted_only_once_its_evaluation_is_good(fleet: Fleet) -> None:
    fleet.v2.stage.play = says("something of its own")
    assert fleet.evaluate().exit_code == 1
    refused = fleet.promote()
    assert isinstance(refused.exception, NotProven)
    assert f"does not say that {MODEL} is good" in str(refused.exception)
    assert fleet.stable == "v1"

    fleet.v2.stage.play = babble  # repaired; what was found before still counts
    assert isinstance(fleet.promote().exception, NotProven)
    assert fleet.evaluate(fleet.v2, fleet.v1).exit_code == 0
    other_way_round = fleet.promote()
    assert isinstance(other_way_round.exception, NotProven)
    assert f"v2 is served at {fleet.v2.url}" in str(other_way_round.exception)
    judged = fleet.evaluate()
    assert judged.exit_code == 0, judged.output
    unknown = fleet.promote(version="v9")
    assert "no version v9" in str(unknown.exception)
    promoted = fleet.promote(model="alias")
    assert promoted.exit_code == 0, promoted.output
    assert fleet.stable == "v2"


def test_nothing_is_promoted_on_an_evaluation_that_was_never_made(fleet: Fleet) -> None:
    refused = fleet.promote()
    assert isinstance(refused.exception, NotProven)
    assert "cannot be read" in str(refused.exception)
    assert fleet.stable == "v1"

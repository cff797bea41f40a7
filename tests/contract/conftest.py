"""Nodes on real ports for tests that come from outside."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway_node import gateway_node
from tests.support.live_node import LiveNode, live_node
from tests.support.serve_process import ServeProcess, serve_process, write_long_model

# What a client can rely on holds through a gateway as well: these run against both.
THROUGH_GATEWAY = {
    "test_deadlines",
    "test_openai_client",
    "test_openapi",
    "test_overload",
    "test_requests",
    "test_streams",
    "test_where",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "shared_node" in metafunc.fixturenames and name in THROUGH_GATEWAY:
        metafunc.parametrize("shared_node", [live_node, gateway_node], indirect=True)


@pytest.fixture(scope="module")
def shared_node(request: pytest.FixtureRequest) -> Iterator[LiveNode]:
    make = getattr(request, "param", live_node)
    with make(max_running_requests=8, max_num_batched_tokens=64) as node:
        yield node


@pytest.fixture
def node(shared_node: LiveNode) -> Iterator[LiveNode]:
    """A node at rest before the test, and proven to be at rest after it."""
    shared_node.stage.reset()
    yield shared_node
    shared_node.stage.reset()
    shared_node.wait_idle()
    assert shared_node.get("/health").status == 200


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model of 16,384 tokens of context."""
    return write_long_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def served_process(long_model: Path) -> Iterator[ServeProcess]:
    with serve_process(long_model, "--kv-memory", "32MiB") as process:
        yield process
        assert process.is_running, process.errors


@pytest.fixture
def process(served_process: ServeProcess) -> Iterator[ServeProcess]:
    """One `kvota serve` for all tests, at rest before and after each."""
    yield served_process
    served_process.wait_idle()

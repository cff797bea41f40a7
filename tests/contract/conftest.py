"""Nodes on real ports for tests that come from outside."""

from collections.abc import Iterator

import pytest

from tests.support.live_node import LiveNode, live_node


@pytest.fixture(scope="module")
def shared_node() -> Iterator[LiveNode]:
    with live_node(max_running_requests=8, max_num_batched_tokens=64) as node:
        yield node


@pytest.fixture
def node(shared_node: LiveNode) -> Iterator[LiveNode]:
    """A node at rest before the test, and proven to be at rest after it."""
    shared_node.stage.reset()
    yield shared_node
    shared_node.stage.reset()
    shared_node.wait_idle()
    assert shared_node.get("/health").status == 200

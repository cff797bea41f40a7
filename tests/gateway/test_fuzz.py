"""Whatever OpenAI's description allows never breaks a gateway: no 5xx, and answers as described.

The same node stands behind it twice: as one of our own, whose answers are passed on as they are,
and as a foreign one, for which the gateway keeps the desk, counts, and puts streams together.

A few hundred cases here; `make fuzz-gateway` sends 5,000 (KVOTA_FUZZ_CASES).
"""

import os
from collections.abc import Iterator

import pytest

from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.gateway_node import LiveGateway
from tests.support.live_node import LiveNode, live_node, staged_model, until
from tests.support.openapi import fuzz, nearly_right
from tests.support.stage import says

NUM_CASES = int(os.environ.get("KVOTA_FUZZ_CASES", "400"))
SHARES = {
    ("/chat/completions", "POST"): 0.15,
    ("/completions", "POST"): 0.45,
    ("/embeddings", "POST"): 0.2,
    ("/models", "GET"): 0.05,
    ("/models/{model}", "GET"): 0.15,
}
KINDS = (BackendKind.KVOTA, BackendKind.VLLM)


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(served=staged_model(max_model_len=512)) as node:
        node.stage.play = says("ok 😀")
        yield node


@pytest.fixture(scope="module", params=KINDS)
def gateway(request: pytest.FixtureRequest, node: LiveNode) -> Iterator[LiveGateway]:
    entry = BackendEntry(name="node", url=node.url, kind=request.param)
    gateway = LiveGateway(entry, abuse_watch=False)
    yield gateway
    gateway.stop()


@pytest.mark.parametrize(("path", "method"), SHARES)
def test_whatever_the_description_allows_never_breaks_a_gateway(
    gateway: LiveGateway, node: LiveNode, path: str, method: str
) -> None:
    num_cases = round(NUM_CASES * SHARES[path, method] / len(KINDS))
    statuses = fuzz(gateway.url, path, method, num_cases)
    assert statuses.total() >= num_cases
    until(lambda: gateway.parts.live.num_open == 0, "no request to be open")
    node.wait_idle()


@pytest.mark.parametrize(
    ("path", "required"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/completions", {"prompt": "hi"}),
    ],
)
def test_bodies_that_are_nearly_right_are_answered_as_described(
    gateway: LiveGateway, node: LiveNode, path: str, required: dict[str, object]
) -> None:
    num_cases = max(NUM_CASES // 20, 10)
    statuses = fuzz(gateway.url, path, "POST", num_cases, nearly_right(node.model, required))
    assert statuses[200] > num_cases // 5, statuses
    node.wait_idle()

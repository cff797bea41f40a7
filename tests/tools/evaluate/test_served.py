"""What kvota's own node tells, over real HTTP, in both dialects."""

from collections.abc import Iterator

import pytest

from kvota.tools.evaluate.answers import Dialect
from kvota.tools.evaluate.served import Place, open_served
from tests.support.live_node import LiveNode, live_node

TEXT = "Both dialects tell the same, é and 東 too."


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node() as made:
        yield made


async def test_a_node_tells_everything_that_is_asked(node: LiveNode) -> None:
    place = Place(f"http://127.0.0.1:{node.port}")
    async with place.client() as client:
        served = await open_served(client, place, 50)
        continued = await served.continued(TEXT, 5)
    assert (served.model, served.dialect, served.top) == ("tiny", Dialect.PROMPT_LOGPROBS, 20)
    assert served.max_model_len == 1024
    assert continued.ids is not None
    assert continued.names is not None
    assert len(continued.ids) == len(continued.names) == 5
    assert "".join(continued.names) == continued.text


async def test_both_dialects_tell_the_same_of_ids_and_of_text(node: LiveNode) -> None:
    place = Place(f"http://127.0.0.1:{node.port}")
    async with place.client() as client:
        served = await open_served(client, place, 5)
        ids = await served.tokens(TEXT, special=False)
        assert ids is not None
        by_id = await served.score(ids)
        by_id_of_text = await served.score(TEXT)
        served.dialect = Dialect.ECHO
        by_name = await served.score(ids)
    assert by_id == by_id_of_text
    assert len(by_id.known) == len(ids) - 1
    assert by_name.positions[0] is None
    for one, other in zip(by_id.known, by_name.known, strict=True):
        assert one.logprob == pytest.approx(other.logprob)
        known = sorted(one.top.values(), reverse=True)[: len(other.top)]
        assert sorted(other.top.values(), reverse=True) == pytest.approx(known)

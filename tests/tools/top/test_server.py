import httpx
import pytest

from kvota.tools.server import ServerUnusable
from kvota.tools.top.server import Server
from tests.support.watched_server import WatchedServer


async def test_a_reading_has_requests_samples_and_readiness() -> None:
    watched = WatchedServer()
    reading = await watched.server().read()
    assert [request.id for request in reading.requests] == ["a", "b", "c"]
    assert reading.samples.total("kvota_kv_blocks") == 16
    assert reading.not_ready is None


async def test_why_it_is_not_ready_comes_with_the_reading() -> None:
    watched = WatchedServer()
    watched.not_ready = "The server is shutting down."
    assert (await watched.server().read()).not_ready == "The server is shutting down."


async def test_a_request_is_cancelled_by_its_id() -> None:
    watched = WatchedServer()
    assert await watched.server().cancel("b") == 1
    assert watched.deleted == ["b"]
    with pytest.raises(ServerUnusable, match="404: No request `b`"):
        await watched.server().cancel("b")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(404, json={"error": {"message": "Nothing."}}), "answered 404: Nothing."),
        (httpx.Response(401, json={"error": {"message": "No key."}}), "--api-key"),
        (httpx.Response(200, text="<html>"), "does not answer like kvota"),
        (httpx.Response(200, json={"data": [{"id": "a"}]}), "does not answer like kvota"),
    ],
)
async def test_another_kind_of_server_is_told_from_kvota(
    response: httpx.Response, said: str
) -> None:
    watched = WatchedServer()
    watched.refusal = response
    with pytest.raises(ServerUnusable, match=said):
        await watched.server().read()


async def test_a_server_that_is_gone_or_slow_is_named() -> None:
    watched = WatchedServer()
    watched.is_down = True
    with pytest.raises(ServerUnusable, match="No answer from http://test"):
        await watched.server().read()

    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late")

    client = httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(late))
    with pytest.raises(ServerUnusable, match="did not answer within 5 s"):
        await Server(client).read()

"""A server's own figures, whatever it calls them."""

import pytest

from kvota.tools.load.gauges import GaugePage, Gauges
from kvota.tools.top.samples import Samples
from tests.support.fake_backend import FakeBackend, fails
from tests.support.live_node import LiveNode

OURS = """\
process_resident_memory_bytes 5e+08
kvota_kv_cache_usage_ratio 0.25
kvota_kv_touched_bytes 3e+08
vllm:kv_cache_usage_perc{model_name="m"} 0.99
kvota_requests_running{lane="short"} 2
kvota_requests_running{lane="long"} 1
kvota_requests_waiting{lane="short",band="batch"} 4
"""
SGLANG = "sglang:token_usage 0.5\nsglang:num_running_reqs 3\n"
GATEWAY = """\
kvota_gateway_process_resident_memory_bytes 1
kvota_gateway_backend_kv_usage_ratio{backend="a"} 0.125
kvota_gateway_backend_requests_running{backend="a"} 3
kvota_gateway_backend_requests_waiting{backend="a"} 2
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (OURS, Gauges(5e8, 0.25, 7.0, 3e8)),
        (SGLANG, Gauges(None, 0.5, 3.0)),
        (GATEWAY, Gauges(None, 0.125, 5.0)),
        ("", Gauges()),
    ],
)
def test_the_first_known_name_counts(page: str, expected: Gauges) -> None:
    assert Gauges.of(Samples.parse(page)) == expected


async def test_a_page_that_is_not_there_says_nothing() -> None:
    async with FakeBackend() as backend:
        backend.gauges.kv_usage, backend.gauges.running = 0.5, 2
        async with GaugePage(backend.url, None) as page:
            assert await page.look() == Gauges(None, 0.5, 2.0)
            backend.overrides["/metrics"] = fails(404)
            assert await page.look() == Gauges()
        url = backend.url
    async with GaugePage(url, None) as page:
        assert await page.look() == Gauges()


async def test_our_own_node_says_everything() -> None:
    node = LiveNode()
    try:
        async with GaugePage(node.url, None) as page:
            seen = await page.look()
    finally:
        node.stop()
    assert seen.memory_bytes is not None
    assert seen.memory_bytes > 2**20
    assert (seen.kv_share, seen.num_open) == (0.0, 0.0)

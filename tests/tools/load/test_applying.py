"""The cap is set at a live node and in the file, and its effect is shown."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from kvota.core.clock import SystemClock
from kvota.tools.load.applying import Applied, apply_cap, require_appliable, with_effect
from kvota.tools.load.bench import Bench, Unwatched
from kvota.tools.load.capacity import Cap
from kvota.tools.load.desk_settings import PATH
from kvota.tools.load.gauges import GaugePage
from kvota.tools.load.knee import Knee
from kvota.tools.load.measure import Slo
from kvota.tools.load.schedule import Lengths, Shape
from kvota.tools.load.sweep import Alone, Sweep, SweepOptions
from kvota.tools.load.sweep_page import sweep_report
from kvota.tools.load.target import find_target
from kvota.tools.load.toml_line import CannotEdit
from kvota.tools.report.html import CannotWrite
from kvota.tools.server import ServerUnusable
from tests.support.fake_backend import FakeBackend
from tests.support.live_node import LiveNode

OPTIONS = SweepOptions(
    shape=Shape(Lengths(8, 8), Lengths(3, 3)), slo=Slo(30.0, 30.0), seconds=1.0, num_requests_min=4
)
RESULT = Sweep(
    OPTIONS.slo, Alone(0.1, 0.01, 0.2), [], Knee(4.0, 4.5), cap=Cap(2, 3)
)  # what a sweep would have found


async def applied(node: LiveNode, config: Path, cap: Cap) -> Applied:
    target = await find_target(node.url, None)
    clock = SystemClock()
    async with target.sender(None) as sender, GaugePage(node.url, None) as page:
        bench = Bench(target, sender, page, clock, Unwatched(), seed=1)
        return await apply_cap(bench, OPTIONS, replace(RESULT, cap=cap), None, config)


async def test_the_running_desk_and_the_file_have_the_cap(tmp_path: Path) -> None:
    config = tmp_path / "kvota.toml"
    node = LiveNode(max_running_requests=8)
    try:
        done = await applied(node, config, Cap(2, 3))
        desk = node.get("/admin/desk").json
    finally:
        node.stop()
    assert (desk["max_running_requests"], desk["max_waiting_queue"]) == (2, 3)
    assert done.in_force == desk
    assert tomllib.loads(config.read_text()) == {
        "engine": {"max_running_requests": 2},
        "desk": {"max_waiting_queue": 3},
    }
    report = with_effect(sweep_report(RESULT, {}), done)
    assert [section.title for section in report.sections[:2]] == ["Rates", "The effect of the cap"]
    table = report.sections[1].table
    assert table is not None
    runs = [run for run in (done.before, done.after) if run is not None]
    assert len(table.rows) == len(runs)
    assert {run.offered_rps for run in runs} <= {6.0}, "one and a half times the knee"


async def test_a_place_for_the_cap_is_looked_for_before_the_sweep(tmp_path: Path) -> None:
    node = LiveNode(max_running_requests=8)
    try:
        config = tmp_path / "kvota.toml"
        await require_appliable(node.url, None, config)
        assert not config.exists()
        config.write_text("engine = {max_running_requests = 64}\n")
        with pytest.raises(CannotEdit):
            await require_appliable(node.url, None, config)
        config.write_text("")
        with pytest.raises(CannotWrite):
            await require_appliable(node.url, None, tmp_path / "kvota.toml" / "kvota.toml")
    finally:
        node.stop()


@pytest.mark.parametrize("page", [None, "<html>", '{"max_num_seqs": 4}'])
async def test_a_server_without_a_desk_is_told_before_the_sweep(
    page: str | None, tmp_path: Path
) -> None:
    async with FakeBackend() as backend:
        if page is not None:
            backend.overrides[PATH] = lambda _, wire: wire.text(page)
        with pytest.raises(ServerUnusable, match="Measure without --apply"):
            await require_appliable(backend.url, None, tmp_path / "kvota.toml")


async def test_where_the_engine_is_too_small_nothing_is_set(tmp_path: Path) -> None:
    config = tmp_path / "kvota.toml"
    node = LiveNode(max_running_requests=8)
    try:
        with pytest.raises(ServerUnusable, match="started for at most 8"):
            await applied(node, config, Cap(9, 3))
        assert node.get("/admin/desk").json["max_running_requests"] == 8
    finally:
        node.stop()
    assert not config.exists()


async def test_where_the_file_cannot_be_changed_the_server_is_not_either(tmp_path: Path) -> None:
    config = tmp_path / "kvota.toml"
    config.write_text("engine = {max_running_requests = 64}\n")
    node = LiveNode(max_running_requests=8)
    try:
        with pytest.raises(CannotEdit):
            await applied(node, config, Cap(2, 3))
        assert node.get("/admin/desk").json["max_running_requests"] == 8
    finally:
        node.stop()

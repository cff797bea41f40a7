"""The screen, driven by keys, before a server whose answers the test writes."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from kvota.core.clock import SystemClock
from kvota.tools.top.app import Question, TopApp
from kvota.tools.top.panels import CarPark, Line, SpeedLine
from tests.support.watched_server import WatchedServer, live, queued

PATIENCE_S = 60.0
INTERVAL_S = 0.1


@asynccontextmanager
async def watching(
    watched: WatchedServer, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Pilot[None]]:
    app = TopApp(watched.server(), SystemClock(), time.time, interval_s=INTERVAL_S)
    async with app.run_test(size=size) as pilot:
        await until(lambda: watched.num_looks > 1 or watched.is_down)
        yield pilot


async def until(met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end_s, "waited too long"
        await asyncio.sleep(0.01)


def text_of(pilot: Pilot[None], selector: str) -> str:
    return str(pilot.app.query_one(selector, Static).render())


def banner(pilot: Pilot[None]) -> str:
    """What the banner says; nothing while it is hidden."""
    shown = pilot.app.query_one("#banner").has_class("shown")
    return text_of(pilot, "#banner") if shown else ""


def rows(pilot: Pilot[None]) -> list[str]:
    table = pilot.app.query_one(DataTable)
    return [" ".join(str(cell) for cell in table.get_row(key)) for key in table.rows]


async def test_it_shows_the_server_its_memory_its_line_and_its_requests() -> None:
    watched = WatchedServer()
    watched.facts |= {"running": 1, "waiting": 1, "refused": {"queue_full": 3}}
    async with watching(watched) as pilot:
        assert re.fullmatch(r"tiny · ready · up \d+ s · http://test", text_of(pilot, "#title"))
        rates = "running 2  waiting 1  preempted 0  refused 3: queue_full 3"
        assert text_of(pilot, "#rates") == rates
        park, line = pilot.app.query_one(CarPark), pilot.app.query_one(Line)
        assert park.render().plain.startswith("A▏A▏A▏B▏B▏B▏B▏B▏░▏░▏·▏·▏·▏·▏·▏·▏")
        assert park.border_title == "KV used 8 (50%) · cached 2 · free 6"
        assert park.border_subtitle == "a bay is 1 block"
        assert line.render().plain == "1     2s client-c KV memory"
        assert pilot.app.query_one(SpeedLine).render().plain.startswith("tok/s")
        assert rows(pilot) == [
            "A  client-a  short  inter  decode  40/40  5/64  12  3  1s  ",
            "B  client-b  short  inter  decode  40/40  5/64  12  5  1s  ",
            "   client-c  short  inter  queued  0/40  0/64  –  0  1s  KV memory",
        ]
        assert banner(pilot) == ""


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (30, 10), (10, 3)])
async def test_it_draws_in_any_terminal(size: tuple[int, int]) -> None:
    watched = WatchedServer()
    watched.requests = [live(str(number)) for number in range(80)]
    watched.requests += [queued(str(number), number) for number in range(80, 400)]
    watched.facts |= {"used": 3000, "cached": 500, "free": 2000}
    async with watching(watched, size) as pilot:
        await pilot.resize_terminal(60, 20)
        seen = watched.num_looks
        await until(lambda: watched.num_looks > seen + 1)
        assert len(rows(pilot)) == 400


async def test_a_server_that_goes_leaves_a_calm_banner_and_is_found_again() -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        watched.is_down = True
        await until(lambda: "No answer from http://test" in banner(pilot))
        assert "Trying again every 0.1 s. This is from 0 s ago." in banner(pilot)
        assert len(rows(pilot)) == 3, "the last that was seen stays"
        watched.is_down = False
        await until(lambda: banner(pilot) == "")


async def test_it_waits_for_a_server_that_is_not_there_yet() -> None:
    watched = WatchedServer()
    watched.is_down = True
    async with watching(watched) as pilot:
        await until(lambda: "No answer" in banner(pilot))
        watched.is_down = False
        await until(lambda: len(rows(pilot)) == 3)


async def test_a_server_that_is_not_ready_says_why() -> None:
    watched = WatchedServer()
    watched.not_ready = "Work waits and the engine makes no progress."
    async with watching(watched) as pilot:
        await until(lambda: banner(pilot).startswith("Not ready: Work waits"))
        assert "not ready" in text_of(pilot, "#title")


async def test_the_cursor_stays_on_its_request_while_rows_come_and_go() -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        await pilot.press("down")
        watched.requests = [live("new", age_s=99.0), *watched.requests]
        await until(lambda: len(rows(pilot)) == 4)
        table = pilot.app.query_one(DataTable)
        assert table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value == "b"


async def test_the_cursor_at_the_top_stays_at_the_top() -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        watched.requests = [live("new", age_s=99.0), *watched.requests]
        await until(lambda: len(rows(pilot)) == 4)
        assert pilot.app.query_one(DataTable).cursor_row == 0


async def test_d_and_yes_cancel_the_request_under_the_cursor() -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        await pilot.press("down", "d")
        await until(lambda: isinstance(pilot.app.screen, Question))
        asked = watched.num_looks
        await until(lambda: watched.num_looks > asked + 1)  # it goes on behind the question
        await pilot.press("y")
        await until(lambda: watched.deleted == ["b"])
        await until(lambda: len(rows(pilot)) == 2)


@pytest.mark.parametrize("key", ["n", "escape", "q"])
async def test_anything_but_yes_cancels_nothing(key: str) -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        await pilot.press("d")
        await until(lambda: isinstance(pilot.app.screen, Question))
        await pilot.press(key)
        await until(lambda: not isinstance(pilot.app.screen, Question))
        assert watched.deleted == []


async def test_with_nothing_to_cancel_nothing_is_asked() -> None:
    watched = WatchedServer()
    watched.requests = []
    async with watching(watched) as pilot:
        await pilot.press("d")
        seen = watched.num_looks
        await until(lambda: watched.num_looks > seen)
        assert not isinstance(pilot.app.screen, Question)
        assert pilot.app.query_one(Line).render().plain == "nobody waits"


async def test_p_stops_looking_and_p_goes_on() -> None:
    watched = WatchedServer()
    async with watching(watched) as pilot:
        await pilot.press("p")
        await until(lambda: banner(pilot) == "Paused; p goes on.")
        await asyncio.sleep(INTERVAL_S)
        seen = watched.num_looks
        await asyncio.sleep(3 * INTERVAL_S)
        assert watched.num_looks == seen
        await pilot.press("p")
        await until(lambda: watched.num_looks > seen and banner(pilot) == "")


async def test_q_quits() -> None:
    async with watching(WatchedServer()) as pilot:
        await pilot.press("q")
        await until(lambda: not pilot.app.is_running)

"""What gateways keep on one machine, where not all of them use the same database."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvota.core.clock import SystemClock
from kvota.gateway.settings import GatewaySettings
from kvota.gateway.store.database import StoreUnusable, sqlite_url
from kvota.gateway.store.usage import UsageStore
from kvota.gateway.stores import Stores, open_stores
from kvota.gateway.usage import UsageFilter, UsageLine
from kvota.telemetry.log import new_log

LINE = UsageLine(key_id="k", tenant="t", model="m", day=20_000, prompt_tokens=3, output_tokens=4)


def stores_of(database: str, folder: Path, closing: ExitStack) -> Stores:
    settings = GatewaySettings(state_dir=str(folder), database=sqlite_url(folder / database))
    log = new_log(closing.enter_context((folder / "log").open("a")))
    return open_stores(settings, "127.0.0.1", {}, SystemClock(), log, closing)


async def test_usage_that_a_dead_gateway_left_goes_into_its_own_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object) -> None:
        raise StoreUnusable("away")

    with ExitStack() as dying:
        stores_of("a.db", tmp_path, dying).usage.add(LINE)
        monkeypatch.setattr(UsageStore, "merge", is_away)
    monkeypatch.undo()
    with ExitStack() as closing:
        assert await stores_of("b.db", tmp_path, closing).usage.lines(UsageFilter()) == []
        assert await stores_of("a.db", tmp_path, closing).usage.lines(UsageFilter()) == [LINE]

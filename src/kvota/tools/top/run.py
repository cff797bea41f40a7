"""The composition root of `kvota top`."""

import time

from kvota.core.clock import SystemClock
from kvota.tools.top.app import TopApp
from kvota.tools.top.server import connect


def run(url: str, api_key: str | None, *, interval_s: float) -> None:
    """Watch the server at `url` until the operator quits."""
    TopApp(connect(url, api_key), SystemClock(), time.time, interval_s=interval_s).run()

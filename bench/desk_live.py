"""The desk on the real server, over HTTP: the `live-…` rows of `python -m bench.desk`.

Each row starts a server of its own on a free port, prints a Markdown table and yields its targets.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from bench.desk_live_aborts import aborts
from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_isolation import isolation
from bench.desk_live_overload import overload
from bench.desk_live_refusals import refusals
from bench.machine import sentence, usable_threads
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.model.source import open_source

ROWS: Final[Mapping[str, Callable[[LiveBench], Iterable[Finding]]]] = {
    "live-overload": overload,
    "live-isolation": isolation,
    "live-refusals": refusals,
    "live-aborts": aborts,
}


def measure(name: str, scale: float, target: Callable[[bool, str], None]) -> None:
    """Run one row, tell each of its targets, and say how long it took."""
    started_s = time.monotonic()
    model = resolve(DEFAULT_MODEL, cache_dir_of(os.environ))
    say = partial(print, flush=True)
    say(f"\n## {name}\n\n{model.name} on {sentence()}\n")
    vocab_size = open_source(model).architecture.vocab_size
    bench = LiveBench(model, vocab_size, usable_threads(), scale, say)
    for finding in ROWS[name](bench):
        target(finding.is_met, finding.text)
    say(f"\n{name} took {time.monotonic() - started_s:.0f} s")

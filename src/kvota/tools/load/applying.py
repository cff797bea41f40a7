"""Sets the cap at the running server and in kvota.toml, and shows what that changes.

The same requests are offered at one and a half times the knee, before and after.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvota.tools.load.bench import Bench
from kvota.tools.load.capacity import Cap
from kvota.tools.load.cut import Cut, End, kept_until_cut
from kvota.tools.load.desk_settings import check_writable, get_desk, put_desk, write_settings
from kvota.tools.load.measure import Measured
from kvota.tools.load.sweep import GeneratorLate, Sweep, SweepOptions, trial
from kvota.tools.load.sweep_page import HEADER, trial_cells
from kvota.tools.report.html import Report, Section, Table, require_writable

OVERLOAD = 1.5  # times the knee


@dataclass(frozen=True, slots=True)
class Applied:
    """What was set, and a run above the knee before and after; None where it was refused.

    `sweep` is what the cap comes from; `cut`: why there is no run after it.
    """

    cap: Cap
    in_force: Mapping[str, object]
    config: str
    before: Measured | None
    after: Measured | None
    sweep: Sweep
    cut: Cut | None = None


async def require_appliable(url: str, api_key: str | None, config: Path) -> None:
    """Before a sweep: there is a desk to set and a file to keep it in.

    Raises ServerUnusable, CannotEdit and CannotWrite.
    """
    check_writable(config, Cap(1, 1).settings)
    require_writable(config)
    await asyncio.to_thread(get_desk, url, api_key)


async def apply_cap(
    bench: Bench, options: SweepOptions, result: Sweep, api_key: str | None, config: Path
) -> Applied:
    """Raises ServerUnusable where there is no desk to set, and CannotEdit; then nothing is set."""
    knee, cap = result.knee, result.cap
    assert knee is not None
    assert cap is not None
    check_writable(config, cap.settings)
    rate = OVERLOAD * knee.rate_rps
    before = await _at(bench, options, result, rate)
    in_force = await asyncio.to_thread(put_desk, bench.target.url, api_key, cap.settings)
    write_settings(config, cap.settings)
    after = None
    with kept_until_cut() as end:
        after = await _at(bench, options, result, rate)
    return Applied(cap, in_force, str(config), before, after, result, end.cut)


def not_applied(end: End) -> Cut:
    """Of an `apply_cap` that was ended: the sweep is whole, and its cap is nowhere in force."""
    assert end.cut is not None
    return replace(end.cut, reason=f"the cap was not applied: {end.cut.reason}")


def with_effect(report: Report, applied: Applied) -> Report:
    """The sweep's page, with the effect of the cap after its first section."""
    header = ("", *HEADER)
    runs = (("before", applied.before), ("after", applied.after))
    rows = [(name, *trial_cells(one)) for name, one in runs if one is not None]
    settings = ", ".join(f"{name} = {value}" for name, value in applied.cap.settings.items())
    text = (
        f"Set at the running server and in {applied.config}: {settings}. Below, the same requests "
        f"at {OVERLOAD:g} times the knee, before and after. What the server cannot serve in time "
        "it now refuses at once, with a time to come back; what it takes, it serves."
    )
    first, *others = report.sections
    section = Section("The effect of the cap", text, Table(header, rows))
    return replace(report, sections=[first, section, *others])


async def _at(
    bench: Bench, options: SweepOptions, result: Sweep, rate_rps: float
) -> Measured | None:
    try:
        return await trial(bench, options, result.alone, rate_rps, "above the knee")
    except GeneratorLate:
        return None

"""Sets the cap at the running server and in kvota.toml, and shows what that changes.

The same requests are offered at one and a half times the knee, before and after.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvota.tools.load.bench import Bench
from kvota.tools.load.capacity import Cap
from kvota.tools.load.desk_settings import check_writable, put_desk, write_settings
from kvota.tools.load.measure import Measured
from kvota.tools.load.sweep import GeneratorLate, Sweep, SweepOptions, trial
from kvota.tools.load.sweep_page import HEADER, trial_cells
from kvota.tools.report.html import Report, Section, Table

OVERLOAD = 1.5  # times the knee


@dataclass(frozen=True, slots=True)
class Applied:
    """What was set, and a run above the knee before and after; None where it was refused."""

    cap: Cap
    in_force: Mapping[str, object]
    config: str
    before: Measured | None
    after: Measured | None


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
    after = await _at(bench, options, result, rate)
    return Applied(cap, in_force, str(config), before, after)


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

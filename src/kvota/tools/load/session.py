"""One run of `kvota bench`: find the server, load it, and hand back what was found."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kvota import __version__
from kvota.core.clock import SystemClock
from kvota.tools.load.bench import Bench, Watch
from kvota.tools.load.cut import Cut
from kvota.tools.load.gauges import GaugePage
from kvota.tools.load.loopback import check_host
from kvota.tools.load.target import find_target
from kvota.tools.report.html import Report, write_html, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The server to load, and how. `is_allowed`: also when it is another machine."""

    url: str
    api_key: str | None = None
    model: str | None = None
    is_chat: bool = False
    seed: int = 1
    is_allowed: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What a mode found: a dataclass for the JSON, and the page. `cut`: why it is not all."""

    result: object
    report: Report
    cut: Cut | None = None

    @classmethod
    def of(cls, result: object, report: Report, cut: Cut | None) -> "Finding":
        """Where it was cut, the page says so first."""
        if cut is None:
            return cls(result, report)
        verdict = f"Incomplete: {cut.reason}. {report.verdict}".rstrip()
        return cls(result, replace(report, verdict=verdict, is_bad=True), cut)

    @property
    def is_good(self) -> bool:
        return not self.report.is_bad

    def as_json(self) -> dict[str, Any]:
        report = self.report
        assert is_dataclass(self.result)
        assert not isinstance(self.result, type)
        return {
            "title": report.title,
            "verdict": report.verdict,
            "is_good": self.is_good,
            "incomplete": None if self.cut is None else self.cut.reason,
            "facts": dict(report.facts),
            "result": asdict(self.result),
        }

    def write(self, paths: tuple[Path, Path]) -> None:
        """The JSON and the page. Raises CannotWrite."""
        write_json(self.as_json(), paths[0])
        write_html(self.report, paths[1])


def paths_of(stem: Path) -> tuple[Path, Path]:
    """The JSON and the page, beside each other."""
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".html")


Mode = Callable[[Bench], Awaitable[Finding]]


async def run(where: Where, mode: Mode, watch: Watch) -> Finding:
    """Raises ForeignHost, ServerUnusable, and what the mode raises."""
    check_host(where.url, is_allowed=where.is_allowed)
    target = await find_target(where.url, where.api_key, model=where.model, is_chat=where.is_chat)
    clock = SystemClock()
    async with (
        target.sender(where.api_key, clock) as sender,
        GaugePage(target.url, where.api_key) as page,
    ):
        return await mode(Bench(target, sender, page, clock, watch, where.seed))


def facts_of(bench: Bench, **own: str) -> Mapping[str, str]:
    """The conditions of a run, for its report."""
    return {
        **bench.target.facts,
        **{name.replace("_", " "): text for name, text in own.items()},
        "seed": str(bench.seed),
        "when": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "kvota": __version__,
    }

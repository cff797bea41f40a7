"""What the documents list is what the code has: nothing is missing, nothing is made up."""

import re
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvota.core.errors import (
    KeyProblem,
    KvotaError,
    Limit,
    Outcome,
    RateLimited,
    Refusal,
    Refused,
    StartupError,
    Unauthorized,
)
from kvota.core.request import Band
from kvota.desk.desk import Desk as PureDesk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.gateway.desk_metrics import DeskMetrics
from kvota.gateway.desk_page import Desk, DeskPage, KnownMemory
from kvota.gateway.metrics import BackendGauges, GatewayMetrics, Gauges, NodeGauges
from kvota.telemetry.embedding_metrics import EmbeddingMetrics
from kvota.telemetry.metrics import DeskGauges, EngineGauges, Metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/http.md").read_text("utf-8")
SOURCE = ROOT / "src/kvota"


def section(title: str) -> str:
    """What stands under a heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def quoted(text: str, pattern: str) -> set[str]:
    return set(re.findall(f"`({pattern})`", text))


def errors(root: type[KvotaError] = KvotaError) -> Iterator[type[KvotaError]]:
    if root is not StartupError:
        yield root
        for one in root.__subclasses__():
            if one.__module__ == KvotaError.__module__:
                yield from errors(one)


def test_every_status_has_its_codes() -> None:
    named: dict[type[KvotaError], type[StrEnum]] = {
        Refused: Refusal, RateLimited: Limit, Unauthorized: KeyProblem,
    }  # fmt: skip
    known = {(one.status, one.code) for one in errors() if one not in named}
    known |= {(one.status, code.value) for one, codes in named.items() for code in codes}
    rows = re.findall(r"^\| (\d{3}) \|([^|]*)\|", section("Statuses"), re.MULTILINE)
    told = {(int(status), code) for status, codes in rows for code in quoted(codes, r"\w+")}
    assert told == known


def test_every_outcome_is_named() -> None:
    sentence = section("Statuses").split("one outcome")[1]
    assert quoted(sentence, "[a-z_]+") == {one.value for one in Outcome}


def test_every_header_is_named() -> None:
    words = rb'"(x-(?:kvota|ratelimit|request|should|api|forwarded)-[a-z-]*[a-z])"'
    files = [
        *SOURCE.glob("edge/*.py"),
        *SOURCE.glob("gateway/**/*.py"),
        *SOURCE.glob("node/**/*.py"),
    ]
    used = {name.decode() for file in files for name in re.findall(words, file.read_bytes())}
    what = ("requests", "tokens")  # their names are put together
    used |= {f"x-ratelimit-{of}-{one}" for of in ("limit", "remaining", "reset") for one in what}
    assert quoted(section("Headers"), "x-[a-z-]+") == used


def names_on(page: bytes) -> set[str]:
    found = {one.name for one in text_string_to_metric_families(page.decode())}
    return {name for name in found if "process_" not in name}


def test_every_metric_is_named() -> None:
    backend = BackendGauges(
        name="b", is_healthy=True, breaker="closed", num_open=0, running=0, waiting=0, kv_usage=0.0
    )
    node = NodeGauges(is_up=True, num_starts=1, load_s=1.0, resident_bytes=1)
    gateway = names_on(GatewayMetrics(lambda: Gauges(backends=(backend,), node=node)).render())
    no_desk = DeskGauges(running={}, waiting={}, num_waiting=0, num_blocks_held_after_end=0)
    generating = names_on(Metrics(model="m", gauges=EngineGauges, desk=lambda: no_desk).render())
    embedding = names_on(EmbeddingMetrics(model="m", waiting=lambda: (0, 0)).render())
    settings = DeskSettings()
    row = Desk("b", PureDesk(100, settings, Forecast(), block_size=1).snapshot(), settings,
               KnownMemory(100, 1, 0, 0))  # fmt: skip
    desks = names_on(DeskPage(lambda: [row], DeskMetrics()).render())
    told = section("Metrics")
    assert quoted(told, r"(?:kvota_|vllm:)\w+") == gateway | generating | embedding | desks
    table = [line.split("|")[1:5] for line in told.splitlines() if line.startswith("|")]
    by_column = [row for row in table if "kvota_gateway" not in row[0]]
    shown = {"node": generating, "desk": desks, "embeds": embedding}
    for column, (which, names) in enumerate(shown.items()):
        ticked = {
            name
            for row in by_column
            for name in quoted(
                row[0] if "✓" in row[column] else row[column], r"(?:kvota_|vllm:)\w+"
            )
        }
        assert ticked == names, which


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")


def test_every_package_is_in_the_map_and_every_file_it_names_is_there() -> None:
    packages = {one.name for one in SOURCE.iterdir() if any(one.glob("*.py"))}
    rows = re.findall(r"^\| `([a-z]+)` \|", ARCHITECTURE, re.MULTILINE)
    assert sorted(rows) == sorted(packages)
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", ARCHITECTURE)
    assert named
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_the_layers_are_those_that_the_linter_holds() -> None:
    told = ARCHITECTURE.split("```\ncli · cli_*\n")[1].split("```")[0]
    rows = [re.split(r"\s{2,}", line)[0] for line in told.splitlines() if line.strip()]
    shown = [set(row.split(" | ")) for row in rows]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    [layers] = [
        one["layers"]
        for one in settings["tool"]["importlinter"]["contracts"]
        if one["type"] == "layers"
    ]
    held = [set(re.findall(r"kvota\.(\w+)", row)) for row in layers]
    assert shown == held[held.index({"config"}) :]


def test_bands_are_those_of_the_header() -> None:
    row = next(line for line in PAGE.splitlines() if "x-kvota-priority" in line)
    assert quoted(row, "[a-z]+") == {one.name.lower() for one in Band}

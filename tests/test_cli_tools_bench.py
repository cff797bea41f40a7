"""`kvota bench` as an operator runs it, against whole nodes and fake servers."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvota import cli_tools_bench
from kvota.tools.load.cut import INTERRUPTED, Cut
from kvota.tools.load.desk_settings import put_desk, write_settings
from kvota.tools.load.loopback import FLAG
from kvota.tools.load.session import Finding
from kvota.tools.load.throughput import Throughput
from kvota.tools.report.html import Report
from kvota.tools.server import ServerUnusable
from tests.support.live_node import LiveNode

RUN = CliRunner()


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    node = LiveNode(max_running_requests=8)
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVOTA_CONFIG", "KVOTA_URL", "KVOTA_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    cli_tools_bench.register(app)
    return RUN.invoke(app, ["bench", *arguments])


def ran(mode: str, node: LiveNode, out: Path, *arguments: str) -> dict[str, object]:
    """The JSON of a mode that ran. The machine may be busy: a refused result is a result."""
    stem = out / mode
    result = bench(mode, "--url", node.url, "--out", str(stem), *arguments)
    assert result.exit_code in (0, cli_tools_bench.EXIT_BAD), result.output
    page = stem.with_name(f"{mode}.html").read_text(encoding="utf-8")
    content: dict[str, object] = json.loads(stem.with_name(f"{mode}.json").read_text("utf-8"))
    assert str(content["verdict"]).split(".")[0] in result.stdout
    assert str(content["title"]) in page
    assert "<svg" in page
    assert content["is_good"] is (result.exit_code == 0)
    return content


def rows(content: dict[str, object], name: str) -> list[dict[str, object]]:
    result = content["result"]
    assert isinstance(result, dict)
    return list(result[name])


def test_baseline_measures_each_length_exactly(node: LiveNode, tmp_path: Path) -> None:
    content = ran(
        "baseline", node, tmp_path, "--prompts", "20,60", "--output", "5", "--requests", "2"
    )
    assert [(row["prompt"], row["num"]) for row in rows(content, "rows")] == [("20", 2), ("60", 2)]
    facts = content["facts"]
    assert isinstance(facts, dict)
    assert facts["prompt lengths"].startswith("exact: token ids")
    assert facts["output lengths"].startswith("forced")


def test_throughput_runs_every_batch(node: LiveNode, tmp_path: Path) -> None:
    for seconds in ("1", "4", "16", "64"):  # on a machine that is busy nothing may come in one
        options = ("--batches", "1,3", "--seconds", seconds, "--output", "5")
        result = bench("throughput", "--url", node.url, "--out", str(tmp_path / "t"), *options)
        if "not one token came" not in result.stderr:
            break
    assert result.exit_code in (0, cli_tools_bench.EXIT_BAD), result.output
    content = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert [row["batch"] for row in rows(content, "rows")] == [1, 3]


def test_isolation_runs_its_three_parts(node: LiveNode, tmp_path: Path) -> None:
    content = ran(
        "isolation", node, tmp_path, "--seconds", "2", "--rate", "4", "--prompt", "10",
        "--output", "4", "--long-prompt", "400", "--long-output", "8",
    )  # fmt: skip
    result = content["result"]
    assert isinstance(result, dict)
    assert [result[part]["name"] for part in ("alone", "beside", "again")] == [
        "alone", "1 long", "alone again",
    ]  # fmt: skip


def test_soak_reads_the_servers_own_figures(node: LiveNode, tmp_path: Path) -> None:
    content = ran(
        "soak", node, tmp_path, "--minutes", "0.05", "--rate", "5", "--prompt", "10",
        "--output", "4",
    )  # fmt: skip
    result = content["result"]
    assert isinstance(result, dict)
    assert (result["kv_before"], result["kv_after"]) == (0.0, 0.0)
    assert len(result["looks"]["memory_bytes"]) > 0


def test_sweep_stops_at_the_rate_it_is_told(node: LiveNode, tmp_path: Path) -> None:
    content = ran(
        "sweep", node, tmp_path, "--seconds", "1", "--min-requests", "5", "--first-rate", "10",
        "--max-rate", "10", "--repeats", "1", "--prompt", "10", "--output", "3",
        "--ttft-slo", "30", "--tpot-slo", "30",
    )  # fmt: skip
    assert {row["offered_rps"] for row in rows(content, "trials")} <= {10.0}


def test_the_cap_reaches_the_running_desk_and_the_file(tmp_path: Path) -> None:
    node = LiveNode(max_running_requests=8)
    settings = {"max_running_requests": 3, "max_waiting_queue": 4}
    path = tmp_path / "kvota.toml"
    path.write_text("[desk]\nmax_waiting_queue = 256 # long\n")
    try:
        in_force = put_desk(node.url, None, settings)
        write_settings(path, settings)
        with pytest.raises(ServerUnusable, match="started for at most 8"):
            put_desk(node.url, None, {"max_running_requests": 9})
    finally:
        node.stop()
    assert {name: in_force[name] for name in settings} == settings
    assert "max_waiting_queue = 4 # long" in path.read_text()
    assert tomllib.loads(path.read_text()) == {
        "engine": {"max_running_requests": 3}, "desk": {"max_waiting_queue": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["baseline", "--url", "http://10.1.2.3:8000"], FLAG),
        (["sweep", "--url", "https://api.example.com"], "is not this machine"),
        (["soak", "--url", "http://127.0.0.1:9"], "Is the server running there"),
    ],
)
def test_what_cannot_be_measured_ends_with_2(arguments: list[str], says: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == cli_tools_bench.EXIT_UNUSABLE
    assert says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["baseline", "--prompts", "128,x"], "'x' is no length"),
        (["throughput", "--batches", "1,0"], "write whole numbers"),
        (["sweep", "--prompt", "9-3"], "do not fall"),
    ],
)
def test_options_that_make_no_sense_are_named(
    node: LiveNode, arguments: list[str], says: str
) -> None:
    result = bench(*arguments, "--url", node.url)
    assert result.exit_code == cli_tools_bench.EXIT_UNUSABLE
    assert says in result.stderr


@pytest.mark.parametrize(
    ("cut", "exit_code"),
    [
        (INTERRUPTED, cli_tools_bench.EXIT_INTERRUPTED),
        (Cut("the server is gone", is_interrupt=False), cli_tools_bench.EXIT_UNUSABLE),
    ],
    ids=["Ctrl-C", "dead server"],
)
def test_what_was_measured_until_it_was_cut_is_shown_and_written(
    cut: Cut, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Throughput([], None, cut)

    async def run(*_: object) -> Finding:
        return Finding.of(result, Report("Throughput", verdict="At most 5 output tokens/s."), cut)

    monkeypatch.setattr(cli_tools_bench, "run", run)
    ended = bench("throughput", "--out", str(tmp_path / "t"))
    assert ended.exit_code == exit_code
    says = f"Incomplete: {cut.reason}. At most 5 output tokens/s."
    assert says in ended.stdout
    assert says in (tmp_path / "t.html").read_text("utf-8")
    assert json.loads((tmp_path / "t.json").read_text("utf-8"))["incomplete"] == cut.reason


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["isolation", "--rate", "inf"], "--rate"),
        (["soak", "--minutes", "inf"], "--minutes"),
        (["throughput", "--seconds", "inf"], "--seconds"),
        (["sweep", "--ttft-slo", "inf"], "--ttft-slo"),
        (["soak", "--pid", "999999999"], "no process 999999999"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments: list[str], says: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_the_key_is_never_shown(node: LiveNode, tmp_path: Path) -> None:
    content = ran(
        "baseline", node, tmp_path, "--prompts", "8", "--output", "2", "--requests", "1",
        "--api-key", "sk-very-secret",
    )  # fmt: skip
    text = json.dumps(content) + (tmp_path / "baseline.html").read_text(encoding="utf-8")
    assert "very-secret" not in text

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvota.cli import app
from kvota.core.errors import KvotaError
from kvota.tools.load.loopback import ForeignHost
from kvota.traffic.opening import TraceFormat, format_of, open_traffic
from tests.support.counting_backend import counting, tokenizing
from tests.support.fake_backend import FakeBackend
from tests.support.small_traces import write_bailian, write_burstgpt

RUN = CliRunner()
HEAD = "bench/traces/mooncake_conversation_head.jsonl.gz"


def test_a_trace_is_described() -> None:
    result = RUN.invoke(app, ["trace", "describe", HEAD])
    assert result.exit_code == 0
    for text in ("Mooncake", "requests/s", "IDC in 1 / 10 / 60 s", "hits, cache of any size"):
        assert text in result.stdout


def test_a_description_is_data_too() -> None:
    result = RUN.invoke(app, ["trace", "describe", "bench/traces/azure_conv_2023.csv.gz", "--json"])
    facts = json.loads(result.stdout)
    assert (facts["format"], facts["num_requests"], facts["reuse"]) == ("Azure", 19_366, None)
    assert facts["bursts"][0]["window_s"] == 1


def test_the_table_has_the_statistics_that_were_published_with_the_trace() -> None:
    """Azure's conversation trace, as computed when it was collected."""
    result = RUN.invoke(app, ["trace", "describe", "bench/traces/azure_conv_2023.csv.gz"])
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    assert {name: value.strip() for name, value in rows.items()} == {
        "figure": "value",
        "requests": "19,366",
        "span": "3,502 s",
        "requests/s": "5.53",
        "CV of gaps": "1.09 (Poisson: 1)",
        "IDC in 1 / 10 / 60 s": "1.39 / 4 / 20.6 (Poisson: 1)",
        "peak/mean in 1 / 10 / 60 s": "2.89 / 1.78 / 1.54",
        "prompt mean / p50 / p95 / p99 / max": "1,155 / 1,020 / 4,083 / 4,142 / 14,050",
        "output mean / p50 / p95 / p99 / max": "211 / 129 / 451 / 601 / 1,000",
        "prompt : output": "5.47 : 1",
        "correlation prompt, output": "-0.11",
        "prompts over 4,096 tokens": "2.1% of requests, 8.2% of prompt tokens",
    }


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("azure_conv_2023.csv.gz", ["Azure", "Arrivals", "Lengths", "mean 5.53", "19,366"]),
        ("servegen_r1_two_hours.jsonl.gz", ["ServeGen", "Arrivals", "Lengths", "mean 11.1"]),
    ],
)
def test_a_description_is_a_page_with_charts(name: str, heads: list[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.html"
    result = RUN.invoke(app, ["trace", "describe", f"bench/traces/{name}", "--html", str(file)])
    assert result.exit_code == 0
    page = file.read_text()
    assert page.count("<svg") == 2
    for text in heads:
        assert text in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_no_arrivals_are_drawn_where_none_are_recorded(tmp_path: Path) -> None:
    lengths, file = tmp_path / "lengths.csv", tmp_path / "trace.html"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n10,20\n30,40\n")
    assert RUN.invoke(app, ["trace", "describe", str(lengths), "--html", str(file)]).exit_code == 0
    assert "Arrivals" not in file.read_text()


def test_clients_are_described_by_their_distributions() -> None:
    result = RUN.invoke(app, ["trace", "describe", "bench/traces/servegen_r1_two_hours.jsonl.gz"])
    assert "clients" in result.stdout
    assert "32" in result.stdout


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("journal", TraceFormat.JOURNAL),
        ("mooncake", TraceFormat.MOONCAKE),
        ("azure", TraceFormat.AZURE),
    ],
)
def test_a_trace_is_converted(to: str, expected: TraceFormat, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    result = RUN.invoke(app, ["trace", "convert", HEAD, "--to", to, "--out", str(out)])
    assert result.exit_code == 0
    assert "400 requests" in result.stderr
    assert format_of(out) is expected


def test_converted_traffic_can_be_piped() -> None:
    result = RUN.invoke(app, ["trace", "convert", HEAD, "--to", "azure"])
    assert result.stdout.startswith("TIMESTAMP,ContextTokens,GeneratedTokens")
    assert len(result.stdout.splitlines()) == 401


def test_a_trace_can_be_converted_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "traffic"
    path.write_bytes(Path(HEAD).read_bytes())
    num = len(list(open_traffic(path).arrivals))
    result = RUN.invoke(app, ["trace", "convert", str(path), "--to", "journal", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert format_of(path) is TraceFormat.JOURNAL
    assert len(list(open_traffic(path).arrivals)) == num
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.csv", tmp_path / "out"
    bad.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,5,5\nno,row,here\n"
    )
    out.write_text("as before")
    result = RUN.invoke(app, ["trace", "convert", str(bad), "--to", "azure", "--out", str(out)])
    assert result.exit_code != 0
    assert out.read_text() == "as before"
    assert sorted(tmp_path.iterdir()) == [bad, out]


def test_no_load_goes_to_another_machine_unasked() -> None:
    result = RUN.invoke(app, ["replay", HEAD, "--url", "http://10.1.2.3:8000"])
    assert isinstance(result.exception, ForeignHost)


@pytest.mark.parametrize(
    "flags",
    [
        ["README.md"],
        [HEAD, "--length-scale", "7"],
        [HEAD, "--time-scale", "0"],
        [HEAD, "--time-scale", "inf"],
        [HEAD, "--from-s", "5000"],
        [HEAD, "--url", "http://127.0.0.1:9"],
    ],
)
def test_what_an_operator_can_fix_is_said_without_a_traceback(flags: list[str]) -> None:
    result = RUN.invoke(app, ["replay", *flags])
    assert isinstance(result.exception, KvotaError)


@pytest.mark.parametrize("flag", ["--ttft-s", "--tpot-s", "--drain-s"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
def test_a_time_that_is_none_is_refused(flag: str, value: str) -> None:
    result = RUN.invoke(app, ["replay", HEAD, "--url", "http://127.0.0.1:9", flag, value])
    assert result.exit_code == 2
    assert "must be more than 0 and finite" in result.output


@pytest.fixture
def url() -> Iterator[str]:
    """A backend on a loop of its own, as the command runs one too."""
    with asyncio.Runner() as runner:
        backend = FakeBackend()
        backend.script = counting
        backend.overrides["/tokenize"] = tokenizing
        runner.run(backend.listen())
        loop = runner.get_loop()
        serving = threading.Thread(target=loop.run_forever)
        serving.start()
        yield backend.url
        asyncio.run_coroutine_threadsafe(backend.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        serving.join(60)


def test_a_replay_is_shown_and_written(url: str, tmp_path: Path) -> None:
    data, page = tmp_path / "replay.json", tmp_path / "replay.html"
    flags = ["--url", url, "--max-requests", "20", "--time-scale", "0.01", "--length-scale", "64"]
    flags += ["--json", str(data), "--html", str(page), "--drain-s", "60"]
    result = RUN.invoke(app, ["replay", HEAD, *flags])
    facts = json.loads(data.read_text())
    assert result.exit_code == (0 if facts["refused"] is None else 1)
    assert len(facts["requests"]) == 20
    assert all(one["code"] is None for one in facts["requests"])
    assert (facts["time_scale"], facts["length_scale"]) == (0.01, 64)
    assert "lag of the generator" in result.stdout
    assert "Replay of mooncake_conversation_head" in page.read_text()


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("6 columns", [(472, 18), (1087, 230), (96, 4)]),
        ("8 columns", [(90, 44), (36, 29), (180, 60)]),
        ("bailian", [(521, 132), (40, 5), (700, 20)]),
    ],
)
def test_formats_that_are_not_shipped_are_described_converted_and_replayed(
    kind: str, lengths: list[tuple[int, int]], url: str, tmp_path: Path
) -> None:
    file = write_bailian(tmp_path) if kind == "bailian" else write_burstgpt(tmp_path, kind)
    facts = json.loads(RUN.invoke(app, ["trace", "describe", str(file), "--json"]).stdout)
    assert facts["num_requests"] == 3
    assert facts["num_passed_over"] == (1 if kind == "6 columns" else 0)

    to = tmp_path / "converted"
    flags = ["--to", "mooncake", "--out", str(to)]
    assert RUN.invoke(app, ["trace", "convert", str(file), *flags]).exit_code == 0
    assert format_of(to) is TraceFormat.MOONCAKE

    written = tmp_path / "replay.json"
    flags = ["--url", url, "--time-scale", "0.005", "--json", str(written), "--drain-s", "60"]
    RUN.invoke(app, ["replay", str(file), *flags])
    sent = json.loads(written.read_text())["requests"]
    asked = [(one["prompt_tokens"], one["output_tokens"]) for one in sent]
    assert asked == lengths

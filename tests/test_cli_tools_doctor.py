"""`kvota doctor` as an operator meets it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvota import cli, cli_tools_doctor
from kvota.tools.doctor.page import Page
from kvota.tools.doctor.window import Reading, Window
from tests.support.live_node import live_node

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _reports_are_left_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_machine_is_examined_with_its_verdict_first(tmp_path: Path) -> None:
    ran = RUN.invoke(cli.app, ["doctor", "--cache-dir", str(tmp_path)])
    assert ran.exit_code in (0, 1), ran.output
    first, *rest = ran.output.splitlines()
    assert first.startswith("This machine ")
    for name in ("memory", "cores", "python", "libraries", "gpu"):
        assert any(name in line for line in rest)


def test_as_json_each_finding_has_its_level(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    ran = RUN.invoke(cli.app, ["doctor", "--json", "--cache-dir", str(folder / "models")])
    shown = json.loads(ran.output)
    by_name = {one["name"]: one for one in shown["findings"]}
    assert by_name["model cache"]["level"] == "problem"
    assert "KVOTA_CACHE_DIR" in by_name["model cache"]["change"]
    assert "model cache" in shown["verdict"]
    assert ran.exit_code == 1


def test_a_server_is_watched_and_its_stations_shown() -> None:
    with live_node() as node:
        assert node.chat(max_tokens=4).status == 200
        ran = RUN.invoke(cli.app, ["doctor", "--url", f"{node.url}/v1", "--seconds", "1"])
        assert ran.exit_code == 0, ran.output
        lines = ran.output.splitlines()
        assert lines[0].startswith("Nothing to judge by")
        starts = [line.split()[0] for line in lines if line.split()]
        assert starts[-7:-1] == ["client", "door", "line", "prefill", "decode", "stream"]
        assert lines[-1] == "Written: doctor.json, doctor.html"
        assert Path("doctor.html").exists()
        as_json = RUN.invoke(cli.app, ["doctor", "--url", node.url, "--seconds", "1", "--json"])
    assert len(json.loads(as_json.stdout)["stations"]) == 6


def test_after_ctrl_c_what_was_seen_is_judged_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page.parse("kvota_requests_running 0\n")
    window = Window([Reading(at_s=at_s, page=page) for at_s in (0.0, 3.0)], is_cut=True)
    monkeypatch.setattr(cli_tools_doctor, "watch", lambda *_: window)
    ran = RUN.invoke(cli.app, ["doctor", "--url", "http://127.0.0.1:9", "--seconds", "60"])
    assert ran.exit_code == cli_tools_doctor.EXIT_INTERRUPTED
    assert "Nothing to judge by: no request in 3 s." in ran.output
    assert json.loads(Path("doctor.json").read_text())["is_incomplete"] is True
    assert "3 s, then interrupted" in Path("doctor.html").read_text()


def test_a_problem_is_the_exit_status() -> None:
    with live_node() as node:
        node.drain()
        ran = RUN.invoke(cli.app, ["doctor", "--url", node.url, "--seconds", "1"])
    assert ran.exit_code == 1
    assert ran.output.startswith("Not ready.")
    assert "▸" in ran.output


def test_a_report_of_a_server_has_its_charts_and_all_the_figures(tmp_path: Path) -> None:
    stem = tmp_path / "visit"
    with live_node() as node:
        node.drain()
        ran = RUN.invoke(
            cli.app, ["doctor", "--url", node.url, "--seconds", "1", "--out", str(stem)]
        )
    assert ran.exit_code == 1
    assert ran.output.splitlines()[-1] == f"Written: {stem}.json, {stem}.html"
    shown = json.loads(stem.with_name("visit.json").read_text())
    assert shown["verdict"] == "Not ready."
    page = stem.with_name("visit.html").read_text()
    assert "Problem: not ready" in page
    assert page.count("<svg") == 3  # and none of the stations, which no request passed
    assert "http-equiv" not in page
    assert "src=" not in page


def test_a_report_of_a_machine_needs_no_server(tmp_path: Path) -> None:
    ran = RUN.invoke(
        cli.app, ["doctor", "--cache-dir", str(tmp_path), "--out", str(tmp_path / "machine")]
    )
    assert ran.exit_code in (0, 1), ran.output
    assert "In order" in (tmp_path / "machine.html").read_text()
    assert json.loads((tmp_path / "machine.json").read_text())["findings"]

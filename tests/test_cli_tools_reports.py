"""A place where no report can be written is told before the work, not after half an hour of it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvota.cli import app

NOBODY = "http://127.0.0.1:9"  # nothing listens there: the place is looked at first
TRACE = "bench/traces/mooncake_conversation_head.jsonl.gz"


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "baseline", "--url", NOBODY, "--out"),
        ("bench", "soak", "--url", NOBODY, "--out"),
        ("evaluate", f"a@{NOBODY}", f"b@{NOBODY}", "--out"),
        ("doctor", "--url", NOBODY, "--out"),
        ("replay", TRACE, "--url", NOBODY, "--json"),
        ("replay", TRACE, "--url", NOBODY, "--html"),
        ("trace", "describe", TRACE, "--html"),
        ("simulate", "--trace", TRACE, "--html"),
        ("simulate", "--trace", TRACE, "--capacity", "--json"),
        ("plan", "llama-3.2-1b", "--hardware", "l4", "--html"),
    ],
    ids=lambda command: "-".join(one for one in command if "/" not in one),
)
def test_where_nothing_can_be_written_nothing_is_begun(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ended = CliRunner().invoke(app, [*command, str(tmp_path / "file" / "report")])
    assert ended.exit_code != 0
    assert "cannot be written" in f"{ended.output} {ended.exception}"


@pytest.mark.parametrize(
    ("command", "worker"),
    [
        (("bench", "baseline", "--url", NOBODY, "--out"), "kvota.cli_tools_bench.run"),
        (("evaluate", f"a@{NOBODY}", f"b@{NOBODY}", "--out"), "kvota.cli_tools_evaluate.evaluate"),
    ],
    ids=["bench", "evaluate"],
)
def test_ctrl_c_ends_with_130_and_says_that_nothing_was_written(
    command: tuple[str, ...], worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, stopped)
    ended = CliRunner().invoke(app, [*command, str(tmp_path / "report")])
    assert ended.exit_code == 130
    assert "Interrupted: nothing was" in ended.output
    assert list(tmp_path.iterdir()) == []

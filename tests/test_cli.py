import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvota import __main__, __version__, cli, cli_sim
from kvota.cli_errors import EXIT_FAILED
from kvota.model.catalog import DEFAULT_MODEL, KNOWN_MODELS
from kvota.sim.calibration import fit_step_cost
from kvota.sim.cost_file import write_cost
from kvota.sim.records import WorldResult
from kvota.sim.simulate import Simulation
from kvota.sim.simulate import simulate as run_simulation
from kvota.telemetry.steps import StepRecord, StepTerms, write_record


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Exit status, standard output and standard error of `kvota ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["kvota", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVOTA_CONFIG", "KVOTA_CACHE_DIR", "KVOTA_PORT", "KVOTA_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_version_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--version"], monkeypatch, capsys)[:2] == (0, f"kvota {__version__}\n")


def test_ctrl_c_while_modules_are_loaded_is_an_end_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


def test_models_lists_what_is_known_and_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(["models", "--cache-dir", str(tmp_path)], monkeypatch, capsys)
    assert code == 0
    assert DEFAULT_MODEL in out
    assert "not fetched" in out


def test_models_shows_where_a_cached_model_is_to_the_last_letter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known, cache = KNOWN_MODELS[DEFAULT_MODEL], tmp_path / ("long" * 25)
    file = known.path(cache)
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(known.source.size_bytes)
    code, out, _ = run(["models", "--cache-dir", str(cache)], monkeypatch, capsys)
    assert code == 0
    assert str(file) in out


def test_models_says_how_each_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, out, _ = run(["models", "list", "--cache-dir", str(tmp_path)], monkeypatch, capsys)
    for name in KNOWN_MODELS:
        assert f"`kvota serve {name}` fetches it" in out
    assert run(["models", "--cache-dir", str(tmp_path)], monkeypatch, capsys)[1] == out


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_is_removed_from_the_cache_that_is_named_wherever_it_is_named(
    is_first: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Before the command it was taken for nobody's, and the user's own cache was emptied."""
    named, own = tmp_path / "named", tmp_path / "own"
    monkeypatch.setenv("KVOTA_CACHE_DIR", str(own))
    folders = [KNOWN_MODELS[DEFAULT_MODEL].folder(cache) for cache in (named, own)]
    for folder in folders:
        folder.mkdir(parents=True)
    place, command = ["--cache-dir", str(named)], ["remove", DEFAULT_MODEL]
    arguments = [*place, *command] if is_first else [*command, *place]
    code, out, _ = run(["models", *arguments], monkeypatch, capsys)
    assert (code, out) == (0, f"Removed {DEFAULT_MODEL}.\n")
    assert [folder.exists() for folder in folders] == [False, True]


def test_help_begins_with_what_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["--help"], monkeypatch, capsys)
    assert code == 0
    assert out.index(" serve ") < min(out.index(f" {name} ") for name in ("plan", "simulate"))


def test_removing_a_model_that_is_not_cached_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["models", "remove", DEFAULT_MODEL, "--cache-dir", str(tmp_path)]
    assert run(arguments, monkeypatch, capsys)[:2] == (
        0,
        f"{DEFAULT_MODEL} was not in the cache.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "nowhere", "--port", "0"], "neither a known model"),
        (["serve", "--port", "70000"], "port is 70000"),
        (["serve", "--config", "/nowhere.toml"], "Cannot read /nowhere.toml"),
        (["serve", "--host", "no.such.host.invalid"], "Cannot listen on no.such.host.invalid"),
        (["models", "remove", "gpt-9"], "'gpt-9' is not a known model"),
    ],
)
def test_what_an_operator_can_fix_is_one_message_and_no_traceback(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, _, err = run(arguments, monkeypatch, capfd)
    assert code == EXIT_FAILED
    assert said in " ".join(err.split())
    assert err.count("cannot start") <= 1
    assert "Traceback" not in err


def test_no_command_but_serve_brings_in_openvino() -> None:
    code = "import sys, kvota.cli; sys.exit('openvino' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(["serve", "--port", str(port)], monkeypatch, capsys)
    assert code == EXIT_FAILED
    assert f"Cannot listen on 127.0.0.1 port {port}" in " ".join(err.split())


def test_an_error_is_shown_whole_also_where_it_has_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvota.toml"
    file.write_text("[engin]\nthreads = 1\n")
    code, _, err = run(["serve", "--config", str(file)], monkeypatch, capsys)
    assert code == EXIT_FAILED
    assert "unknown section [engin]: did you mean engine?" in " ".join(err.split())


def test_only_what_starts_a_server_says_that_it_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no.csv")
    code, _, err = run(["trace", "describe", missing], monkeypatch, capsys)
    assert code == EXIT_FAILED
    assert missing in err.replace("\n", "")
    assert "cannot start" not in err
    _, _, err = run(["node", "--config", missing], monkeypatch, capsys)
    assert err.startswith("kvota cannot start.")


def test_chat_without_a_server_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    code, _, err = run(["chat", "hi", "--url", url], monkeypatch, capsys)
    assert code == EXIT_FAILED
    assert "kvota serve" in err
    assert "cannot start" not in err


def test_what_is_piped_into_chat_is_said_without_the_line_break_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    class Echo:
        def __init__(self, client: object, **options: object) -> None: ...

        def say(self, text: str) -> list[str]:
            said.append(text)
            return ["hello"]

    monkeypatch.setattr(cli, "Conversation", Echo)
    monkeypatch.setattr(sys, "stdin", io.StringIO("  two\nlines\n\n"))
    assert run(["chat"], monkeypatch, capsys)[:2] == (0, "hello\n")
    assert said == ["  two\nlines"]


def test_top_without_a_terminal_says_where_programs_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["top"], monkeypatch, capsys)
    assert code == EXIT_FAILED
    assert "GET /admin/requests" in err
    assert "cannot start" not in err


def test_no_command_but_top_brings_in_textual() -> None:
    code = "import sys, kvota.cli; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,20
2023-11-16 18:00:01.0000000,200,40
2023-11-16 18:00:02.5000000,50,10
"""


def test_a_trace_is_simulated_the_same_way_every_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    arguments = ["simulate", "--trace", str(trace), "--policy", "reserve", "--seed", "5"]
    first, second = (run(arguments, monkeypatch, capsys) for _ in range(2))
    assert first == second
    assert first[0] == 0
    assert "completed 3" in first[1]


def test_what_is_no_trace_and_no_cost_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("hello\n")
    for arguments, said in (
        (["simulate", "--trace", str(nonsense)], "nor an Azure"),
        (["simulate", "--trace", str(tmp_path / "nowhere")], "there is no such file"),
        (["simulate", "--trace", str(nonsense), "--cost", str(nonsense)], "is no step cost"),
        (["calibrate", str(nonsense)], "nonsense"),
    ):
        code, _, err = run(arguments, monkeypatch, capsys)
        assert code == EXIT_FAILED
        assert said in " ".join(err.split())


@pytest.mark.parametrize(
    "option",
    [
        "--kv-tokens 15",
        "--requests 0",
        "--time-scale 0",
        "--time-scale nan",
        "--length-scale 0",
        "--history 1",
        "--max-tokens 0",
        "--max-running-requests 0",
        "--max-waiting-queue -1",
        "--ttft-s nan",
        "--tpot-s -1",
    ],
)
def test_a_figure_that_cannot_be_simulated_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    arguments = ["simulate", "--trace", str(trace), *option.split()]
    code, out, err = run(arguments, monkeypatch, capsys)
    assert (code, out) == (EXIT_FAILED, "")
    assert option.split()[0] in err
    assert "Traceback" not in err


def test_recorded_steps_become_a_step_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps, out = tmp_path / "steps.jsonl", tmp_path / "cost.json"
    with steps.open("w") as file:
        for i in range(60):
            terms = StepTerms(prefill=0, attention=0.0, decodes=1 + i % 8, context=100 * (i % 5))
            write_record(file, StepRecord(terms, 0.02 + 0.001 * terms.decodes))
    code, shown, _ = run(["calibrate", str(steps), "--out", str(out)], monkeypatch, capsys)
    assert code == 0
    assert "out of sample 24 steps: mean 0.0%" in shown
    assert json.loads(out.read_text())["base"] == pytest.approx(0.02, rel=0.01)
    trace = "bench/traces/azure_conv_2023.csv.gz"
    simulate = ["simulate", "--trace", trace, "--requests", "40", "--cost", str(out)]
    code, shown, _ = run(simulate, monkeypatch, capsys)
    assert code == 0
    assert "completed 40" in shown


def test_a_simulated_step_holds_as_many_tokens_as_the_machine_that_its_cost_is_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    trace.write_text(TRACE)
    write_cost(fit_step_cost([StepRecord(StepTerms(0, 0.0, 1, 9), 0.02)] * 20), cost)
    asked: list[Simulation] = []

    def record(one: Simulation) -> WorldResult:
        asked.append(one)
        return run_simulation(one)

    monkeypatch.setattr(cli_sim, "run_simulation", record)
    of_node, own = ["--cost", str(cost)], ["--max-num-batched-tokens", "96"]
    for flags in ([], of_node, own, [*of_node, *own]):
        assert run(["simulate", "--trace", str(trace), *flags], monkeypatch, capsys)[0] == 0
    assert [one.limits.max_num_batched_tokens for one in asked] == [2048, 512, 96, 96]

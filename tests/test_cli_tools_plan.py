"""The command: what a person reads, what a program reads, and how it fails."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvota import cli_tools_plan
from tests.support.plan_machine import CPU


def run(*arguments: str) -> Result:
    app = typer.Typer(add_completion=False)
    cli_tools_plan.register(app)
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)


def test_the_answer_comes_first_and_its_reasons_next() -> None:
    result = run("llama-3.1-8b", "--hardware", "h100-sxm", "--users", "64")
    assert result.exit_code == 0
    text = result.stdout
    assert "Take 1 replica on 1 × NVIDIA H100 SXM: weights bf16, KV f16" in text
    for part in (
        "llama-3.1-8b on NVIDIA H100 SXM",
        "8.03 B parameters · 32 layers · 8 KV heads of 128",
        "no coarser one saves a device",
        "= 63.8 GB  KV",
        "memory bandwidth",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct",
        "[[backends]]",
        "Q4_K_M 4.91 GB",
    ):
        assert part in text
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_json_holds_bytes_and_seconds() -> None:
    answer = json.loads(run("llama-3.1-8b", "--hardware", "h100-sxm", "--json").stdout)
    plan = answer["recommended"]
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["weights_bytes"] == 16_060_522_496
    assert plan["memory"][-1]["bytes"] == plan["kv_bytes"]
    assert plan["alone"]["decode_bound"] == "memory bandwidth"
    assert answer["reasons"]["replicas"]["value"] == "1"
    assert answer["vllm_serve"].startswith("vllm serve")


def test_variations_stand_side_by_side() -> None:
    result = run(
        "llama-3.3-70b", "--hardware", "a100-80", "--what-if", "weights=awq", "--what-if",
        "hardware=l4,tp=1",
    )  # fmt: skip
    lines = result.stdout.splitlines()
    weights = next(line for line in lines if line.startswith("weights"))
    assert weights.split("  ")[0] == "weights"
    assert "bf16, 141 GB" in weights
    assert "awq, 39.8 GB" in weights
    assert "does not fit on 1 × NVIDIA L4" in result.stdout


def test_variations_in_json() -> None:
    result = run(
        "llama-3.3-70b", "--hardware", "a100-80", "--json", "--what-if", "hardware=l4,tp=1"
    )
    answers = json.loads(result.stdout)
    assert answers["as asked"]["recommended"]["tensor_parallel"] == 2
    assert "does not fit" in answers["hardware=l4,tp=1"]["impossible"]


def test_the_page_shows_what_a_machine_could_carry(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    result = run("llama-3.1-8b", "--hardware", "l4", "--users", "64", "--html", str(file))
    assert result.exit_code == 0
    page = file.read_text()
    for text in (
        "Take 1 replica on 1 × NVIDIA L4: weights fp8, KV fp8.",
        "bf16 would take 2 devices instead of 1",
        "<td>weights</td><td>− 9.09 GB</td>",
        "GB of one device",
        "requests at once over tokens of a request",
        "TTFT in ms over requests in flight",
        "TPOT target",
        "memory bandwidth: ",
        "<pre>vllm serve meta-llama/Llama-3.1-8B-Instruct",
    ):
        assert text in page
    assert page.count("<svg") == 5
    assert ">fp8, int8</text>" in page  # their lines lie on each other


def test_a_machine_without_gpu_has_a_page_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvota.tools.plan.question.this_machine", lambda: CPU)
    file = tmp_path / "plan.html"
    assert run("qwen2.5-0.5b", "--html", str(file)).exit_code == 0
    assert "reserve for activations" in file.read_text()


def test_variations_are_drawn_in_the_same_charts(tmp_path: Path) -> None:
    file = tmp_path / "plans.html"
    flags = ["--what-if", "weights=awq", "--what-if", "hardware=l4,tp=1", "--html", str(file)]
    assert run("llama-3.3-70b", "--hardware", "a100-80", *flags).exit_code == 0
    page = file.read_text()
    assert page.count("<svg") == 4
    for text in ("as asked, weights: ", "weights=awq, KV: ", "hardware=l4,tp=1 cannot be"):
        assert text in page


def test_no_figure_is_broken_where_a_program_reads() -> None:
    table = run("llama-3.1-8b", "--hardware", "l4").stdout.splitlines()
    for name in ("bf16", "fp8", "awq"):
        assert any(line.lstrip().startswith(name) and " ms " in line for line in table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-9"], "Did you mean"),
        (["llama-3.1-8b", "--hardware", "h1"], "no known hardware"),
        (["llama-3.1-8b", "--hardware", "l4", "--weights", "fp5"], "no weights are called 'fp5'"),
        (["llama-3.1-8b", "--hardware", "l4", "--what-if", "x=1"], "--what-if cannot change 'x'"),
        (["deepseek-v3", "--hardware", "t4"], "does not fit on 8 × NVIDIA T4"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == cli_tools_plan.EXIT_IMPOSSIBLE
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_config_says_which_field(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    result = run(str(file), "--hardware", "l4")
    assert result.exit_code == cli_tools_plan.EXIT_IMPOSSIBLE
    assert "config.json: num_hidden_layers is missing; it must be a whole number." in result.stderr

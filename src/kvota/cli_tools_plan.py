"""The command `kvota plan`: capacity before there is a server, or even a machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvota.core.errors import KvotaError
from kvota.tools.plan import page
from kvota.tools.plan.question import Question, cache_type, read_hardware, read_model, varied
from kvota.tools.plan.recommend import DEVICES_MAX, Recommendation, Wanted
from kvota.tools.plan.show import as_json, show, show_side_by_side
from kvota.tools.plan.workload import TYPICAL_OUTPUT, TYPICAL_PROMPT, Workload
from kvota.tools.report.html import require_writable, write_html

EXIT_IMPOSSIBLE = 2
PIPED_WIDTH = 120  # columns


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(plan)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json or its directory, a GGUF file, or a known name (llama-3.1-8b)."
        ),
    ],
    hardware: Annotated[
        str, typer.Option(help="A known device (h100-sxm, l40s, t4 …), or this machine: here.")
    ] = "here",
    prompt: Annotated[int, typer.Option(help="Tokens of a typical prompt.")] = TYPICAL_PROMPT,
    output: Annotated[int, typer.Option(help="Tokens of a typical answer.")] = TYPICAL_OUTPUT,
    longest: Annotated[
        int | None, typer.Option(help="Longest prompt + answer.  [default: as long as fits]")
    ] = None,
    users: Annotated[int, typer.Option(help="Requests in flight at the busiest moment.")] = 16,
    ttft: Annotated[float, typer.Option(help="First token within so many seconds.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Seconds for each further token.")] = 0.1,
    weights: Annotated[
        str | None,
        typer.Option(help="bf16, fp8, int8, awq, gptq, q4_k_m …; here: f16, int8, int4."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", "--tp", help="Devices of one replica.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="f16, fp8; here: f16, u8.")] = None,
    devices: Annotated[int, typer.Option(help="Most devices of one replica.")] = DEVICES_MAX,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Compare: weights=awq,tp=2 or hardware=l40s,users=64. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
) -> None:
    """What MODEL needs, how many users a machine carries, and the settings for it."""
    try:
        require_writable(html)
        shape, stored = read_model(model)
        question = Question(
            shape=shape,
            stored=stored,
            hardware=read_hardware(hardware),
            workload=Workload(
                prompt_tokens=prompt, output_tokens=output, longest_tokens=longest,
                users=users, ttft_s=ttft, tpot_s=tpot,
            ),
            weights=weights,
            wanted=Wanted(
                tensor_parallel=tensor_parallel,
                cache_type=cache_type(kv_cache_dtype) if kv_cache_dtype else None,
                devices_max=devices,
            ),
        )  # fmt: skip
        _answer(question, what_if or [], html, in_json=as_json)
    except KvotaError as error:
        Console(stderr=True, highlight=False).print(escape(error.message), soft_wrap=True)
        sys.exit(EXIT_IMPOSSIBLE)


def _answer(question: Question, variations: list[str], html: Path | None, *, in_json: bool) -> None:
    if not variations:
        _answer_one(question.answer(), html, in_json=in_json)
        return
    columns = [("as asked", _tried(question))]
    columns += [(text, _tried(varied(question, text))) for text in variations]
    if html is not None:
        write_html(page.side_by_side(columns), html)
    if in_json:
        typer.echo(json.dumps({title: _json(answer) for title, answer in columns}, indent=2))
    else:
        show_side_by_side(columns, _console())


def _answer_one(answer: Recommendation, html: Path | None, *, in_json: bool) -> None:
    if html is not None:
        write_html(page.report(answer), html)
    if in_json:
        typer.echo(json.dumps(as_json(answer), indent=2))
    else:
        show(answer, _console())


def _console() -> Console:
    """Where a program reads it, wide enough that no figure is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def _tried(question: Question) -> Recommendation | str:
    try:
        return question.answer()
    except KvotaError as error:
        return error.message


def _json(answer: Recommendation | str) -> object:
    return {"impossible": answer} if isinstance(answer, str) else as_json(answer)

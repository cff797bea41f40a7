"""The command `kvota evaluate`: is one version of a model, as served, as good as another?

Exit codes: 0 good; 1 worse than allowed; 2 it cannot be judged, or a server cannot be used; 130
after Ctrl-C. What was measured until Ctrl-C, or until a server was gone, is shown and written.
"""

import asyncio
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvota.core.errors import ConfigError
from kvota.tools.evaluate import page
from kvota.tools.evaluate.gate import Rules, Verdict
from kvota.tools.evaluate.run import Evaluation, Options, evaluate
from kvota.tools.evaluate.served import Place
from kvota.tools.evaluate.tasks import COMMAND, TaskOptions
from kvota.tools.evaluate.texts import shipped_prompts, shipped_texts, text_of
from kvota.tools.load.progress import Bar
from kvota.tools.report.html import require_writable, write_html, write_json
from kvota.tools.report.terminal import progress_bar, show

EXIT_INTERRUPTED: Final = 130
EXITS: Final = {Verdict.GOOD: 0, Verdict.WORSE: 1, Verdict.UNDECIDED: 2}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("evaluate")(evaluate_command)


def evaluate_command(
    baseline: Annotated[str, typer.Argument(help="What is good: URL, MODEL@URL, or MODEL.")],
    candidate: Annotated[str, typer.Argument(help="What is to be judged, likewise.")],
    url: Annotated[
        str, typer.Option(envvar="KVOTA_URL", help="Where a MODEL without a URL is.")
    ] = "http://127.0.0.1:8000",
    max_drop: Annotated[
        float, typer.Option(min=0, help="Allowed rise of perplexity and loss of right answers.")
    ] = 0.05,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Allowed KL, nats per token.  [default: any]")
    ] = None,
    min_agreement: Annotated[
        float | None, typer.Option(min=0, max=1, help="Greedy agreement needed.  [default: any]")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Read this file, not what is shipped. Repeatable.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens read at once.")] = 128,
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens for the KL.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a greedy answer.")] = 48,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once to each.")] = 4,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.")] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Tasks of your own.")] = None,
    lm_eval: Annotated[str, typer.Option(help="The harness's program.")] = COMMAND,
    out: Annotated[Path, typer.Option(help="Path of the report, without ending.")] = Path(
        "evaluate"
    ),
    api_key: Annotated[
        str | None, typer.Option(envvar="KVOTA_API_KEY", help="A key of both servers.")
    ] = None,
    candidate_key: Annotated[
        str | None,
        typer.Option(envvar="KVOTA_CANDIDATE_API_KEY", help="The candidate's, if another."),
    ] = None,
) -> None:
    """Is CANDIDATE as good as BASELINE? Exits with 0 good, 1 worse, 2 cannot be judged.

    Compares perplexity, KL divergence, greedy answers and tasks, in pairs. Only what chance does
    not explain counts as worse.
    """
    places = (
        Place.parse(baseline, url=url, api_key=api_key),
        Place.parse(candidate, url=url, api_key=candidate_key or api_key),
    )
    if places[0] == places[1]:
        raise ConfigError("Baseline and candidate are the same: name two servers or two models.")
    options = Options(
        texts=[text_of(path) for path in text] if text else shipped_texts(),
        prompts=shipped_prompts(),
        rules=Rules(max_drop, max_kl, min_agreement),
        tasks=TaskOptions(_names(tasks), limit, task_dir, lm_eval),
        window=window,
        top=top,
        max_tokens=max_tokens,
        concurrency=concurrency,
    )
    written = out.with_name(out.name + ".json"), out.with_name(out.name + ".html")
    require_writable(*written)
    try:
        with progress_bar() as bar:
            found = asyncio.run(evaluate(*places, options, Bar(bar)))
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted: nothing was measured, and nothing written.")
        sys.exit(EXIT_INTERRUPTED)
    _show(found, written)
    if found.cut is not None and found.cut.is_interrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXITS[found.verdict])


def _show(found: Evaluation, written: tuple[Path, Path]) -> None:
    now = datetime.now().astimezone()
    write_json(page.as_json(found, time.time()), written[0])
    write_html(page.report(found, now.strftime("%Y-%m-%d %H:%M %Z")), written[1])
    console = Console(highlight=False, soft_wrap=True)
    for side, name in ((found.baseline, "baseline"), (found.candidate, "candidate")):
        console.print(f"{name:<10} {page.side_text(side)}", markup=False)
    for table in page.tables(found):
        console.print()
        show(table, console)
    console.print()
    for note in page.notes(found):
        console.print(note, markup=False)
    console.print(page.verdict_text(found), markup=False)
    console.print(f"Written: {written[0]}, {written[1]}", markup=False)


def _names(tasks: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (tasks or "").split(",") if name.strip())

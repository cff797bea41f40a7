"""The commands `kvota simulate` and `kvota calibrate`: traffic and policies without a model."""

import math
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvota.cli_numbers import positive
from kvota.core.errors import ConfigError, KvotaError
from kvota.desk.settings import Admission, DeskSettings
from kvota.model.threads import usable_cores
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim import capacity_page, simulate_page
from kvota.sim.calibration import fit_step_cost
from kvota.sim.capacity import FACTORS, CapacityCurve, CapacityQuestion
from kvota.sim.capacity import capacity as find_capacity
from kvota.sim.cost_file import read_cost, write_cost
from kvota.sim.crew import Crew
from kvota.sim.executor import StepCost
from kvota.sim.fault_words import plan_of
from kvota.sim.records import Targets, WorldResult
from kvota.sim.simulate import Simulation, report
from kvota.sim.simulate import simulate as run_simulation
from kvota.telemetry.steps import read_records
from kvota.tools.report.html import require_writable, write_html, write_json
from kvota.tools.report.terminal import progress_bar, show
from kvota.traffic.arrival import Scaling

EXIT_BAD_FIT = 1
BLOCK_TOKENS = 16  # of a simulated machine: the least KV there can be
_EXAMPLE_STEP_TOKENS = 2048  # of the machine below
_FACTORS = ",".join(map("{:g}".format, FACTORS))

# A GPU-like machine: 20 ms a step, 0.1 ms more per sequence, 20,000 prompt tokens a second.
EXAMPLE_COST = StepCost(base=0.02, per_prefill_token=0.00005, per_decode=0.0001)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(simulate)
    app.command()(calibrate)


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="Azure, Mooncake, Bailian, BurstGPT, ServeGen, ShareGPT lengths, or our journal."
        ),
    ],
    policy: Annotated[Admission, typer.Option(help="How the desk prices a request.")] = (
        Admission.FORECAST
    ),
    risk: Annotated[float, typer.Option(help="z of the forecast.")] = 2.0,
    kv_tokens: Annotated[
        int, typer.Option(min=BLOCK_TOKENS, help="KV memory of the machine, in tokens.")
    ] = 40_000,
    cost: Annotated[
        Path | None, typer.Option(help="Step cost written by `kvota calibrate`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides everything that is left to chance.")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="slow_step@60:2.0, executor_error@120, abort_storm@30:0.5 or clock_jump@90:30: "
            "what happens at which second. May be given several times."
        ),
    ] = None,
    time_scale: Annotated[
        float, typer.Option(callback=positive, help="2: arrivals at half the speed.")
    ] = 1.0,
    length_scale: Annotated[
        int, typer.Option(min=1, help="2: prompts and outputs half as long.")
    ] = 1,
    history: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of the trace to learn lengths from, not served."),
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="What clients allow; no trace says it.")
    ] = 1024,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Choices at once.")] = 64,
    max_waiting_queue: Annotated[int, typer.Option(min=0, help="Choices in line.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per step.  [default: with --cost 512, as a node has; else 2048]"
        ),
    ] = None,
    ttft_s: Annotated[
        float, typer.Option(callback=positive, help="Goodput: first token within.")
    ] = 10.0,
    tpot_s: Annotated[
        float, typer.Option(callback=positive, help="Goodput: time per output token within.")
    ] = 0.2,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="How many replicas, as the load grows.")
    ] = False,
    goal: Annotated[
        float, typer.Option(min=0, max=1, help="--capacity: share that must be good.")
    ] = 0.99,
    factors: Annotated[str, typer.Option(help="--capacity: times the recorded load.")] = _FACTORS,
    pool: Annotated[
        int, typer.Option(min=1, help="--capacity: fleets to this size are simulated whole.")
    ] = 4,
    whole: Annotated[
        int, typer.Option(min=0, help="--capacity: and those of loads to so many requests.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="--capacity: processes.  [default: one for each core]")
    ] = 0,
    price: Annotated[
        float | None, typer.Option(min=0, help="--capacity: of a replica for an hour.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
) -> None:
    """Run the real desk, scheduler and KV cache on recorded traffic, under a manual clock.

    With --capacity, many of such nodes behind the gateway's router.
    """
    require_writable(json_file, html)
    step_cost, jitter = (EXAMPLE_COST, None) if cost is None else read_cost(_existing(cost))
    asked = Simulation(
        trace=_existing(trace),
        kv_tokens=kv_tokens,
        cost=step_cost,
        jitter=jitter,
        max_tokens=max_tokens,
        limits=SchedulerLimits(
            max_running_requests=max_running_requests,
            max_num_batched_tokens=max_num_batched_tokens or _tokens_of_a_step(cost),
        ),
        desk=DeskSettings(
            admission=policy,
            risk=risk,
            max_running_requests=max_running_requests,
            max_waiting_queue=max_waiting_queue,
        ),
        scaling=Scaling(time=time_scale, length=length_scale),
        seed=seed,
        num_requests_max=requests,
        history_share=history,
        faults=plan_of(fault or ()),
    )
    targets = Targets(ttft_s, tpot_s)
    if not capacity:
        _simulate(asked, targets, json_file, html)
        return
    if fault:
        raise ConfigError("--fault is for one node; leave it out with --capacity.")
    question = CapacityQuestion(
        simulation=asked,
        targets=targets,
        goal=goal,
        factors=_factors(factors),
        pool=pool,
        whole_max=whole,
    )
    _show(question, _curve(question, workers or usable_cores()), price, json_file, html)


def _tokens_of_a_step(cost: Path | None) -> int:
    """A calibrated cost is of one of our nodes, the example's is of a larger machine."""
    return _EXAMPLE_STEP_TOKENS if cost is None else SchedulerLimits().max_num_batched_tokens


def _simulate(
    asked: Simulation, targets: Targets, json_file: Path | None, html: Path | None
) -> None:
    with progress_bar() as bar:
        bar.add_task(f"simulating {asked.trace.name}", total=None)
        result = _run(asked)
    typer.echo(report(result, targets, asked.faults))
    if json_file is not None:
        write_json(simulate_page.as_json(asked, result, targets), json_file)
    if html is not None:
        write_html(simulate_page.report(asked, result, targets), html)


def _run(asked: Simulation) -> WorldResult:
    """One seed decides everything, so what breaks here breaks there again, at the same step."""
    try:
        return run_simulation(asked)
    except KvotaError:
        raise
    except Exception as broken:  # the boundary: whatever our bug is, say how to see it again
        seed = [] if "--seed" in sys.argv else ["--seed", str(asked.seed)]
        again = shlex.join(["kvota", *sys.argv[1:], *seed])
        typer.echo(f"It broke: {broken}\nsee it again with: {again}", err=True)
        raise


def calibrate(
    steps: Annotated[Path, typer.Argument(help="Written by `kvota serve --record-steps FILE`.")],
    out: Annotated[Path | None, typer.Option(help="Where the step cost is written.")] = None,
) -> None:
    """Learn what a step costs from a live node, and say how well unseen steps are predicted."""
    with _existing(steps).open() as file:
        try:
            fit = fit_step_cost(list(read_records(file)))
        except ValueError as error:
            raise ConfigError(f"{steps}: {error}.") from error
    for name, value in asdict(fit.cost).items():
        typer.echo(f"{name:<18} {value:.3e} s")
    typer.echo(f"fitted        {fit.fitted.line()}")
    typer.echo(f"out of sample {fit.unseen.line()}")
    if out is not None:
        write_cost(fit, out)
    if not fit.is_good:
        typer.echo("Targets out of sample: mean below 9 %, p99 below 15 %.", err=True)
        sys.exit(EXIT_BAD_FIT)


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = tuple(float(one) for one in text.split(","))
    except ValueError:
        factors = (math.nan,)
    if not all(map(math.isfinite, factors)):
        raise ConfigError(f"--factors {text!r}: write numbers like 1,10,100.")
    return factors


def _curve(question: CapacityQuestion, num_workers: int) -> CapacityCurve:
    with progress_bar() as bar, Crew(num_workers) if num_workers > 1 else nullcontext() as crew:
        task = bar.add_task("reading the trace", total=None)

        def watch(what: str, num_done: int, num: int) -> None:
            bar.update(task, description=what, completed=num_done, total=num)

        return find_capacity(question, watch, crew)


def _show(
    question: CapacityQuestion,
    curve: CapacityCurve,
    price: float | None,
    json_file: Path | None,
    html: Path | None,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    show(capacity_page.curve_table(curve, price), console)
    console.print(capacity_page.how_known(question, curve), markup=False)
    if json_file is not None:
        write_json(capacity_page.as_json(question, curve, price), json_file)
    if html is not None:
        write_html(capacity_page.report(question, curve, price), html)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    return path

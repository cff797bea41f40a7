"""The commands `kvota simulate` and `kvota calibrate`: traffic and policies without a model."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvota.core.errors import ConfigError
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.calibration import fit_step_cost
from kvota.sim.executor import StepCost
from kvota.sim.records import Targets
from kvota.sim.simulate import Simulation, report
from kvota.sim.simulate import simulate as run_simulation
from kvota.telemetry.steps import read_records
from kvota.traffic.arrival import Scaling

EXIT_BAD_FIT = 1

# A GPU-like machine: 20 ms a step, 0.1 ms more per sequence, 20,000 prompt tokens a second.
EXAMPLE_COST = StepCost(base=0.02, per_prefill_token=0.00005, per_decode=0.0001)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(simulate)
    app.command()(calibrate)


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Azure CSV, Mooncake, ServeGen, ShareGPT, or a journal.")
    ],
    policy: Annotated[Admission, typer.Option(help="How the desk prices a request.")] = (
        Admission.FORECAST
    ),
    risk: Annotated[float, typer.Option(help="z of the forecast.")] = 2.0,
    kv_tokens: Annotated[int, typer.Option(help="KV memory of the machine, in tokens.")] = 40_000,
    cost: Annotated[
        Path | None, typer.Option(help="Step cost written by `kvota calibrate`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides everything that is left to chance.")] = 1,
    requests: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    time_scale: Annotated[float, typer.Option(help="2: arrivals at half the speed.")] = 1.0,
    length_scale: Annotated[int, typer.Option(help="2: prompts and outputs half as long.")] = 1,
    history: Annotated[
        float, typer.Option(help="Share of the trace to learn lengths from, not served.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="What clients allow; no trace says it.")] = 1024,
    max_running_requests: Annotated[int, typer.Option(help="Choices at once.")] = 64,
    max_waiting_queue: Annotated[int, typer.Option(help="Choices in line.")] = 256,
    ttft_s: Annotated[float, typer.Option(help="Goodput: first token within.")] = 10.0,
    tpot_s: Annotated[float, typer.Option(help="Goodput: time per output token within.")] = 0.2,
) -> None:
    """Run the real desk, scheduler and KV cache on recorded traffic, under a manual clock."""
    asked = Simulation(
        trace=_existing(trace),
        kv_tokens=kv_tokens,
        cost=_read_cost(cost) if cost is not None else EXAMPLE_COST,
        max_tokens=max_tokens,
        limits=SchedulerLimits(
            max_running_requests=max_running_requests,
            max_num_batched_tokens=max(2048, 2 * max_running_requests),
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
    )
    typer.echo(report(run_simulation(asked), Targets(ttft_s, tpot_s)))


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
        out.write_text(json.dumps(asdict(fit.cost), indent=1) + "\n")
    if not fit.is_good:
        typer.echo("Targets out of sample: mean below 9 %, p99 below 15 %.", err=True)
        sys.exit(EXIT_BAD_FIT)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    return path


def _read_cost(path: Path) -> StepCost:
    try:
        return msgspec.json.decode(_existing(path).read_bytes(), type=StepCost)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no step cost: {error}.") from error

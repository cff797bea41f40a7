"""What an operator sees while a node starts: progress, the model, the memory bill, the address."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvota.model.encoder import Encoder
from kvota.model.load import LoadedModel
from kvota.model.package_fetch import FetchStep
from kvota.sizing.memory import MemoryBill, size

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Startup:
    """Writes to one console. Without a terminal there are no bars, only one line a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def fetching(self) -> Iterator[Callable[[FetchStep], None]]:
        """A bar for each stage of a download; nothing when there is nothing to download."""
        with self._progress() as progress:
            tasks: dict[str, TaskID] = {}

            def show(step: FetchStep) -> None:
                if step.stage not in tasks:
                    self._say(step.stage)
                    tasks[step.stage] = progress.add_task(step.stage, total=None)
                progress.update(
                    tasks[step.stage], completed=step.done_bytes, total=step.total_bytes
                )

            yield show

    @contextmanager
    def loading(self) -> Iterator[Callable[[int, int], None]]:
        """A bar over the weights read."""
        with self._progress() as progress:
            self._say("loading weights")
            task = progress.add_task("loading weights", total=None)

            def show(num_read: int, num_all: int) -> None:
                progress.update(task, completed=num_read, total=num_all)
                if num_read == num_all:
                    progress.update(task, description="compiling")

            yield show

    def show_model(self, name: str, path: Path, loaded: LoadedModel) -> None:
        compiled = loaded.compiled
        self._console.print(
            f"[bold]{escape(name)}[/bold]  {escape(str(path))}\n"
            f"weights {loaded.weight_format} · {compiled.num_threads} threads · "
            f"context {loaded.max_position:,} tokens",
            soft_wrap=True,
        )
        for warning in loaded.warnings:
            self._console.print(f"[yellow]Note:[/yellow] {escape(warning)}", soft_wrap=True)

    def show_encoder(self, name: str, path: Path, encoder: Encoder, *, num_bytes: int) -> None:
        self._console.print(
            f"[bold]{escape(name)}[/bold]  {escape(str(path))}\n"
            f"embeddings of {encoder.num_dimensions} dimensions · texts of up to "
            f"{encoder.max_len} tokens · {size(num_bytes)} of memory",
            soft_wrap=True,
        )

    def show_bill(self, bill: MemoryBill) -> None:
        lines = bill.lines()
        wide, wider = (max(len(line[column]) for line in lines) for column in (0, 1))
        for amount, what, how in lines:
            self._console.print(
                f"{amount:>{wide}}  {what:<{wider}}  [dim]{how}[/dim]", soft_wrap=True
            )

    def show_address(self, host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        self._console.print(
            f"Listening on [bold]http://{shown}:{port}[/bold]  (Ctrl-C drains and stops)"
        )
        if host not in _LOOPBACK:
            self._console.print(
                "[yellow]Note:[/yellow] this address is reachable from other machines, and a node "
                "asks for no key: let only gateways reach it, or use `kvota serve`.",
                soft_wrap=True,
            )

    def show_socket(self, path: str) -> None:
        self._console.print(
            f"Listening on the unix socket {escape(path)}  (Ctrl-C drains and stops)",
            soft_wrap=True,
        )

    def _say(self, stage: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{stage}…")

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

"""What every live row needs: a model, a server around it, and a place to say things."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.desk_live_load import Job
from bench.desk_live_mix import Ask
from bench.server_process import UNGUESSED, RunningServer, kvota_server


@dataclass(frozen=True, slots=True)
class LiveBench:
    """`scale` shortens a row: 1 is what the README quotes."""

    model: Path
    vocab_size: int
    threads: int
    scale: float
    say: Callable[[str], None]

    @contextmanager
    def server(self, flags: Sequence[str]) -> Iterator[RunningServer]:
        """A server with these flags, which are said first: they are part of the result.

        Without speculation: what the desk does for a request beside others is judged by the same
        request alone, and that would be the one to gain.
        """
        flags = [*flags, *UNGUESSED]
        self.say(f"Server flags: {' '.join(flags)}\n")
        with kvota_server(self.model, self.threads, flags) as running:
            yield running

    def job(self, server: RunningServer, asks: Sequence[Ask], hang_s: float, seed: object) -> Job:
        """Requests to `server` for the load generator."""
        return Job(server.port, server.model, self.vocab_size, asks, hang_s, repr(seed))


@dataclass(frozen=True, slots=True)
class Finding:
    """A target, with what was measured."""

    is_met: bool
    text: str

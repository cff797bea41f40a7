"""An open-loop load generator in a process of its own: it sends on time, whatever comes back.

The parent writes one line of JSON, a job, to the child's stdin and reads one JSON list of what was
seen. Once it closes stdin, no more is sent. The requests are built before the clock starts, and the
child measures itself: `lag_s` is how much later than due a request was sent. All other times count
from the moment it was due, so that a generator that is late can only make the server look worse.
"""

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.client import BenchFailed, ask, completion_body
from bench.desk_live_mix import Ask, fresh_prompts

HEAD_START_S = 0.5  # from ready to the first moment of the plan


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client saw. Times are seconds since the request was due; None is never."""

    lag_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    status: int | None = None
    code: str | None = None
    is_whole: bool = False
    is_hanging: bool = False  # it got no ending within `hang_s`
    num_tokens: int = 0
    message: str | None = None
    due_at_s: float = 0.0  # when it was due, by the clock that all processes of a machine share

    @property
    def per_token_s(self) -> float:
        """Mean time of the tokens after the first; 0 without any."""
        if self.first_s is None or self.last_s is None:
            return 0.0
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the generator must know. `hang_s`: a client without an ending by then hangs."""

    port: int
    model: str
    vocab_size: int
    asks: Sequence[Ask]
    hang_s: float
    seed: str


def offer(job: Job) -> list[Seen]:
    """Run the job in a child process; what each client saw, in the order of `asks`."""
    with LoadProcess(job) as load:
        return load.seen()


class LoadProcess:
    """A job under way. Leaving the `with` block ends it, if it has not ended."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "bench.desk_live_load"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(asdict(job)) + "\n")
        self._child.stdin.flush()

    def __enter__(self) -> "LoadProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        self.send_no_more()
        assert self._child.stdout is not None
        self._child.stdout.close()

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def send_no_more(self) -> None:
        """What is not due yet is left out; what was sent is followed to its end."""
        stdin = self._child.stdin
        assert stdin is not None
        stdin.close()

    def seen(self) -> list[Seen]:
        """Wait for the end. Raises BenchFailed when the generator itself failed."""
        assert self._child.stdout is not None
        text = self._child.stdout.read()
        if self._child.wait() != 0:
            raise BenchFailed(f"the load generator ended with code {self._child.returncode}")
        return [Seen(**fields) for fields in json.loads(text)]


async def send_on_time(job: Job, is_over: asyncio.Event) -> list[Seen]:
    """Send every request when it is due, until `is_over`, and follow each to its end."""
    prompts = fresh_prompts(job.asks, job.vocab_size, job.seed)
    bodies = [
        completion_body(job.model, prompt, one.output_tokens)
        for prompt, one in zip(prompts, job.asks, strict=True)
    ]
    del prompts
    gc.disable()  # a collection would delay what is due meanwhile
    clients: list[asyncio.Task[Seen]] = []
    sending = asyncio.create_task(_send_all(job, bodies, clients))
    over = asyncio.create_task(is_over.wait())
    await asyncio.wait((sending, over), return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    if sending.done():
        sending.result()
    sending.cancel()
    return list(await asyncio.gather(*clients))


async def _send_all(job: Job, bodies: Sequence[bytes], clients: "list[asyncio.Task[Seen]]") -> None:
    """Each when it is due. Its client is added to `clients`."""
    start_s = time.perf_counter() + HEAD_START_S
    for one, body in zip(job.asks, bodies, strict=True):
        due_s = start_s + one.due_s
        await asyncio.sleep(due_s - time.perf_counter())
        clients.append(asyncio.create_task(_follow(job, body, due_s)))


async def _follow(job: Job, body: bytes, due_s: float) -> Seen:
    lag_s = time.perf_counter() - due_s
    try:
        asked = await ask(job.port, body)
    except OSError as error:
        ended_s, code = time.perf_counter() - due_s, f"connection: {error.strerror}"
        return Seen(lag_s, ended_s, code=code, due_at_s=due_s)
    is_hanging = False
    try:
        async with asyncio.timeout(job.hang_s):
            await asked.ended
    except TimeoutError:
        is_hanging = True
        asked.leave()
    answer = asked.answer
    return Seen(
        lag_s,
        (answer.ended_s or time.perf_counter()) - due_s,
        answer.first_s - due_s if answer.first_s else None,
        answer.last_s - due_s if answer.last_s else None,
        answer.status,
        answer.code,
        answer.is_whole,
        is_hanging,
        answer.num_tokens,
        answer.message,
        due_s,
    )


async def _send_until_told(job: Job) -> list[Seen]:
    """The end of stdin is the word that no more is wanted."""
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, _at_its_end, loop, is_over)
    return await send_on_time(job, is_over)


def _at_its_end(loop: asyncio.AbstractEventLoop, is_over: asyncio.Event) -> None:
    loop.remove_reader(sys.stdin)
    is_over.set()


def main() -> None:
    fields = json.loads(sys.stdin.readline())
    fields["asks"] = [Ask(**one) for one in fields["asks"]]
    seen = asyncio.run(_send_until_told(Job(**fields)))
    json.dump([asdict(one) for one in seen], sys.stdout)


if __name__ == "__main__":
    main()

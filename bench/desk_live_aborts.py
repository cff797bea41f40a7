"""A thousand requests aborted over HTTP at random moments; afterwards nothing of them is left.

KV memory, places and the line are small, so that every state occurs: in line, paused, reading a
prompt, decoding; streams and plain answers; both lanes and bands. A request is aborted by closing
its connection, by DELETE, or in the middle of its body; after a random time, or a random number of
events of its stream.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from bench.client import Asked, ask, complete, completion_body
from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_http import delete, get_json
from bench.desk_live_metrics import Page, scrape
from bench.desk_live_mix import Ask, fresh_prompts
from bench.server_process import RunningServer

FLAGS = (
    "--max-model-len", "1024", "--kv-memory", "48MiB", "--max-running-requests", "12",
    "--max-waiting-queue", "16", "--max-num-batched-tokens", "96",
    "--long-request-threshold", "300", "--queue-timeout-s", "4", "--request-timeout-s", "12",
)  # fmt: skip
NUM_ABORTS = 1_000
NUM_CLIENTS = 24  # a few more than fit in KV memory and in line
DELAY_S = (0.001, 4.0)
SETTLE_MAX_S = 15.0
WHOLE_PROMPT, WHOLE_OUTPUT = 900, 100  # nearly all of the window: it needs what was given back

HEADER = (
    "| sent | aborted | by closing, DELETE, half a body | streams | last seen where | "
    "ended before | blocks used after | held after abort | counted by the server |\n"
    "|--:|--:|---|--:|---|---|--:|--:|--:|"
)


class Way(StrEnum):
    CLOSE = "close"
    DELETE = "delete"
    HALF_BODY = "half a body"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request and how it will be aborted: after `delay_s`, or after `num_events` if sooner."""

    name: str
    ask: Ask
    is_stream: bool
    is_batch: bool
    way: Way
    delay_s: float
    num_events: int | None


def attempt(chance: Random, number: int) -> Attempt:
    """A request like no other, and a moment to abort it: short delays as likely as long ones."""
    is_long = chance.random() < 0.2
    prompt = chance.randint(301, 800) if is_long else chance.randint(8, 300)
    way = chance.choices(tuple(Way), weights=(7, 2, 1))[0]
    shortest_s, longest_s = DELAY_S
    delay_s = shortest_s * (longest_s / shortest_s) ** chance.random()
    counts_events = chance.random() < 0.3
    return Attempt(
        name=f"abort-{number}",
        ask=Ask(0.0, prompt, chance.randint(1, 200), is_long),
        is_stream=counts_events or chance.random() < 0.5,
        is_batch=chance.random() < 0.3,
        way=way,
        delay_s=longest_s if counts_events else delay_s,
        num_events=chance.randint(1, 30) if counts_events else None,
    )


@dataclass(slots=True)
class Tally:
    """What the clients did and saw."""

    num_sent: int = 0
    num_streams: int = 0  # of the aborted
    aborted: Counter[Way] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # of the aborted, when last looked at
    ended: Counter[str] = field(default_factory=Counter)  # before they could be aborted
    statuses: Counter[int] = field(default_factory=Counter)

    def see(self, one: Attempt, asked: Asked, phase: str) -> None:
        answer = asked.answer
        if answer.status is not None:
            self.statuses[answer.status] += 1
        if asked.is_left or answer.code == "request_cancelled":
            self.aborted[one.way] += 1
            self.num_streams += one.is_stream
            self.phases[phase] += 1
        else:
            self.ended[answer.code or ("whole" if answer.is_whole else "no answer")] += 1


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The server once all is over. `num_more`: requests that were sent after the aborts."""

    page: Page
    num_more: int
    settled_s: float
    is_whole: bool  # a request of nearly the whole KV was served

    @property
    def num_counted(self) -> int:
        return round(self.page.total("kvota_requests_total")) - self.num_more


def aborts(bench: LiveBench) -> Iterator[Finding]:
    """The row: table, targets."""
    with bench.server(FLAGS) as server:
        crowd = _Crowd(bench, server, round(bench.scale * NUM_ABORTS))
        tally = asyncio.run(crowd.abort_all())
        after = _aftermath(bench, server)
    bench.say(f"{HEADER}\n{line(tally, after)}\n")
    bench.say(f"Outcomes by the server: {_counts(after.page.by('kvota_requests_total', 'outcome'))}"
              f"; preemptions: {after.page.total('kvota_preemptions_total'):.0f}\n")  # fmt: skip
    yield from findings(tally, after)


def line(tally: Tally, after: Aftermath) -> str:
    ways = ", ".join(str(tally.aborted[way]) for way in Way)
    return (
        f"| {tally.num_sent} | {tally.aborted.total()} | {ways} | {tally.num_streams} "
        f"| {_counts(tally.phases)} | {_counts(tally.ended)} "
        f"| {after.page.total('kvota_kv_blocks', state='used'):.0f} "
        f"| {after.page.total('kvota_kv_blocks_held_after_abort'):.0f} | {after.num_counted} |"
    )


def findings(tally: Tally, after: Aftermath) -> Iterator[Finding]:
    """The targets: zero of each."""
    page = after.page
    used = page.total("kvota_kv_blocks", state="used")
    held = page.total("kvota_kv_blocks_held_after_abort")
    yield Finding(used == held == 0, f"{used + held:.0f} blocks leaked (0)")
    live = page.total("kvota_requests_running") + page.total("kvota_requests_waiting")
    yield Finding(live == 0, f"the desk still counts {live:.0f} requests (0); all were gone "
                  f"{after.settled_s:.1f} s after the last abort")  # fmt: skip
    extra = after.num_counted - tally.num_sent
    yield Finding(extra == 0, f"{extra:+d} endings over requests sent (0)")
    bad = sum(
        num for status, num in tally.statuses.items() if status >= 500 and status not in (503, 504)
    )
    failed = page.total("kvota_requests_total", outcome="engine_error")
    yield Finding(bad + failed == 0, f"{bad} answers of 5xx other than 503 and 504, {failed:.0f} "
                  "engine errors (0)")  # fmt: skip
    strange = tally.ended["no answer"]
    yield Finding(strange == 0, f"{strange} connections closed without an answer (0)")
    yield Finding(after.is_whole, "a request for nearly all KV is served afterwards")


def _counts(counts: "Counter[str] | dict[str, float]") -> str:
    return ", ".join(f"{name} {num:.0f}" for name, num in sorted(counts.items())) or "–"


def _aftermath(bench: LiveBench, server: RunningServer) -> Aftermath:
    """Wait until nothing runs or waits, then ask for more than any leak would leave."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < SETTLE_MAX_S:
        page = scrape(server.port)
        live = page.total("kvota_requests_running") + page.total("kvota_requests_waiting")
        if not live and not page.total("kvota_kv_blocks", state="used"):
            break
        time.sleep(0.1)
    settled_s = time.monotonic() - started_s
    prompt = fresh_prompts([Ask(0.0, WHOLE_PROMPT, 0)], bench.vocab_size, "whole")[0]
    body = completion_body(server.model, prompt, WHOLE_OUTPUT)
    answer = asyncio.run(complete(server.port, body))
    time.sleep(0.5)  # the record of a request is written after its last byte
    return Aftermath(scrape(server.port), 1, settled_s, answer.is_whole)


@dataclass(slots=True)
class _Crowd:
    """Clients that ask and abort until `num_wanted` aborts have happened."""

    bench: LiveBench
    server: RunningServer
    num_wanted: int
    tally: Tally = field(default_factory=Tally)
    _phases: dict[str, str] = field(default_factory=dict)
    _chance: Random = field(default_factory=lambda: Random(11))

    async def abort_all(self) -> Tally:
        looking = asyncio.create_task(self._look_for_ever())
        await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        return self.tally

    async def _client(self) -> None:
        tally = self.tally
        while tally.aborted.total() < self.num_wanted:
            tally.num_sent += 1
            one = attempt(self._chance, tally.num_sent)
            asked = await self._send(one)
            with suppress(TimeoutError):
                async with asyncio.timeout(one.delay_s):
                    await asked.heard(one.num_events)
            phase = self._phases.get(one.name, "not seen")
            if not asked.ended.done():
                await self._abort(one, asked)
            tally.see(one, asked, phase)

    async def _send(self, one: Attempt) -> Asked:
        prompt = fresh_prompts([one.ask], self.bench.vocab_size, one.name)[0]
        body = completion_body(
            self.server.model, prompt, one.ask.output_tokens, is_stream=one.is_stream
        )
        headers = {"x-request-id": one.name}
        if one.is_batch:
            headers["x-kvota-priority"] = "batch"
        num_bytes = len(body) // 2 if one.way is Way.HALF_BODY else len(body)
        return await ask(self.server.port, body, headers=headers, num_bytes=num_bytes)

    async def _abort(self, one: Attempt, asked: Asked) -> None:
        """Returns when the connection is closed."""
        if one.way is Way.DELETE:
            await delete(self.server.port, f"/v1/requests/{one.name}")
        else:
            asked.leave()
        await asked.ended

    async def _look_for_ever(self) -> None:
        """Note where each request is, several times a second."""
        while True:
            found = json.loads(await get_json(self.server.port, "/v1/requests"))
            self._phases.update({view["client_id"]: view["phase"] for view in found["data"]})
            await asyncio.sleep(0.2)

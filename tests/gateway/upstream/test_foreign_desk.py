"""A desk in front of a backend that has none: who runs, who waits, and that everything ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from kvota.core.clock import SystemClock
from kvota.core.errors import (
    ClientClosed,
    KvotaError,
    Outcome,
    OutputTooLong,
    Refusal,
    Refused,
    RequestTimeout,
)
from kvota.core.request import Band
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Ticket
from kvota.edge.arrival import Arrival
from kvota.gateway.caller import Caller
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.correction import KvReading
from kvota.gateway.upstream.failures import AttemptFailed
from kvota.gateway.upstream.foreign_desk import ForeignDesk, ticket_of
from kvota.gateway.upstream.passage import Ask
from kvota.gateway.upstream.place import Place
from kvota.gateway.upstream.relay import Relay, while_client_stays
from tests.support import fake_backend as fake
from tests.support.exchange_client import ExchangeClient
from tests.support.fake_backend import FakeBackend, Wire

CHAT = fake.GENERATING[0]
CLOCK = SystemClock()
PATIENCE_S = 60.0


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def new_desk(capacity_tokens: int = 1000, **settings: Any) -> ForeignDesk:
    """Reserving, so that a test can say who fits."""
    settings = {"admission": Admission.RESERVE, "long_request_threshold": 10**6, **settings}
    return ForeignDesk(CLOCK, DeskSettings(**settings), capacity_tokens=capacity_tokens)


def new_ticket(name: str, tokens: int = 1000, **fields: Any) -> Ticket:
    """It may grow to `tokens` of KV."""
    half = tokens // 2
    fields = {"tenant": "t", "arrived_s": CLOCK.now(), **fields}
    return Ticket(id=name, prompt_tokens=half, max_tokens=tokens - half, **fields)


class Stay:
    """A block that lasts until it is told to end."""

    def __init__(self, desk: ForeignDesk, ticket: Ticket) -> None:
        self.place: Place | None = None
        self.can_go = asyncio.Event()
        self.task = asyncio.create_task(self._run(desk, ticket))

    async def _run(self, desk: ForeignDesk, ticket: Ticket) -> None:
        async with desk.admitted(ticket) as place:
            self.place = place
            await self.can_go.wait()

    @property
    def is_running(self) -> bool:
        return self.place is not None

    async def end(self) -> None:
        self.can_go.set()
        await self.task

    async def fails(self) -> KvotaError:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KvotaError) as failed:
                await self.task
        return failed.value


def is_empty(desk: ForeignDesk) -> bool:
    desk.check()
    counts = desk.snapshot()
    tally = counts.tally
    return (
        counts.held_tokens == 0
        and counts.num_choices == 0
        and counts.num_waiting_choices == 0
        and tally.arrived == tally.ended.total()
    )


# --- the line


async def test_who_fits_runs_at_once() -> None:
    desk = new_desk()
    async with desk.admitted(new_ticket("a")) as place:
        assert place.queued_s < PATIENCE_S
        assert desk.snapshot().num_choices == 1
        assert desk.remark("a") is None
    assert is_empty(desk)
    assert desk.snapshot().tally.ended[Outcome.COMPLETED] == 1


async def test_who_does_not_fit_waits_for_the_one_before_it() -> None:
    desk = new_desk()
    first, second = Stay(desk, new_ticket("a")), Stay(desk, new_ticket("b"))
    await until(lambda: first.is_running and desk.waits("b") is not None)
    third = Stay(desk, new_ticket("c"))
    await until(lambda: desk.waits("c") is not None)
    assert not second.is_running
    assert (desk.remark("b") or "").startswith("queued position=1")
    assert (desk.remark("c") or "").startswith("queued position=2")
    await first.end()
    await until(lambda: second.is_running)
    assert not third.is_running
    await second.end()
    await until(lambda: third.is_running)
    await third.end()
    assert is_empty(desk)


async def test_a_full_line_refuses() -> None:
    desk = new_desk(max_waiting_queue=1)
    first, second = Stay(desk, new_ticket("a")), Stay(desk, new_ticket("b"))
    await until(lambda: first.is_running and desk.waits("b") is not None)
    refused = await Stay(desk, new_ticket("c")).fails()
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.QUEUE_FULL
    assert refused.retry_after_s >= 1
    await first.end()
    await second.end()
    assert is_empty(desk)


async def test_the_wait_in_line_has_an_end() -> None:
    desk = new_desk()
    first = Stay(desk, new_ticket("a"))
    await until(lambda: first.is_running)
    late = Stay(desk, new_ticket("b", queue_deadline_s=CLOCK.now() + 0.1))
    refused = await late.fails()
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.QUEUE_TIMEOUT
    assert not late.is_running
    await first.end()
    assert is_empty(desk)
    assert desk.snapshot().tally.ended[Outcome.QUEUE_TIMEOUT] == 1


async def test_who_leaves_the_line_is_forgotten() -> None:
    desk = new_desk()
    first, second = Stay(desk, new_ticket("a")), Stay(desk, new_ticket("b"))
    await until(lambda: first.is_running and desk.waits("b") is not None)
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    assert desk.waits("b") is None
    again = Stay(desk, new_ticket("b"))
    await until(lambda: desk.waits("b") is not None)
    await first.end()
    await until(lambda: again.is_running)
    await again.end()
    assert is_empty(desk)


async def test_what_can_never_fit_is_the_clients_to_change() -> None:
    desk = new_desk()
    assert isinstance(await Stay(desk, new_ticket("a", 1001)).fails(), OutputTooLong)
    assert is_empty(desk)


async def test_interactive_goes_before_batch() -> None:
    desk = new_desk()
    first = Stay(desk, new_ticket("a"))
    await until(lambda: first.is_running)
    batch = Stay(desk, new_ticket("b", band=Band.BATCH))
    await until(lambda: desk.waits("b") is not None)
    interactive = Stay(desk, new_ticket("c"))
    await until(lambda: desk.waits("c") is not None)
    await first.end()
    await until(lambda: interactive.is_running)
    assert not batch.is_running
    await interactive.end()
    await batch.end()
    assert is_empty(desk)


def test_a_ticket_says_what_the_caller_may() -> None:
    caller = Caller(key_id="k", tenant="acme", weight=3.0, band_max=Band.BATCH)
    arrival = Arrival(
        id="r", client_id="c", arrived_s=1.0, queue_deadline_s=2.0, deadline_s=9.0,
        band=Band.INTERACTIVE, created=0,
    )  # fmt: skip
    ticket = ticket_of(caller, arrival, model="m", prompt_tokens=7, max_tokens=5, num_choices=2)
    assert (ticket.tenant, ticket.weight, ticket.band) == ("acme", 3.0, Band.BATCH)
    assert (ticket.prompt_tokens, ticket.max_tokens, ticket.n) == (7, 5, 2)
    assert (ticket.queue_deadline_s, ticket.deadline_s) == (2.0, 9.0)


async def test_draining_ends_the_line_and_lets_the_running_finish() -> None:
    desk = new_desk()
    first, second = Stay(desk, new_ticket("a")), Stay(desk, new_ticket("b"))
    await until(lambda: first.is_running and desk.waits("b") is not None)
    desk.drain()
    refused = await second.fails()
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.DRAINING
    assert isinstance(await Stay(desk, new_ticket("c")).fails(), Refused)
    drained = asyncio.create_task(desk.wait_drained())
    await first.end()
    await asyncio.wait_for(drained, PATIENCE_S)
    assert is_empty(desk)


# --- running


async def test_every_token_is_on_the_ledger() -> None:
    desk = new_desk(admission=Admission.FORECAST)
    async with desk.admitted(new_ticket("a", 200)) as place:
        assert desk.snapshot().held_tokens == 100
        place.produced(0, 30, is_done=False)
        assert desk.snapshot().held_tokens == 130
        place.prompt_counted(150)  # our count was an estimate
        place.produced(0, 31, is_done=False)
        assert desk.snapshot().held_tokens == 181
    assert is_empty(desk)


async def test_tokens_between_the_first_and_the_last_are_told_with_the_tick() -> None:
    desk = new_desk(admission=Admission.FORECAST)
    async with desk.admitted(new_ticket("a", 200)) as place:
        place.produced(0, 1, is_done=False)
        place.produced(0, 30, is_done=False)
        assert desk._desk.snapshot().held_tokens == 101
        await until(lambda: desk._desk.snapshot().held_tokens == 130)
        place.produced(0, 40, is_done=False)
        place.produced(0, 50, is_done=True)
        assert desk._desk.snapshot().held_tokens == 150


async def test_whoever_arrives_finds_every_token_counted() -> None:
    desk = new_desk(admission=Admission.OPTIMISTIC)
    free = desk.snapshot().capacity_tokens
    async with desk.admitted(new_ticket("a", free)) as place:
        place.produced(0, 1, is_done=False)
        place.produced(0, free - 110, is_done=False)
        waiting = Stay(desk, new_ticket("b", 1))
        await until(lambda: desk.waits("b") is not None)
    await until(lambda: waiting.is_running)
    await waiting.end()


async def test_a_lease_past_its_deadline_is_cut() -> None:
    desk = new_desk()
    late = Stay(desk, new_ticket("a", deadline_s=CLOCK.now() + 0.1))
    assert isinstance(await late.fails(), RequestTimeout)
    assert is_empty(desk)
    assert desk.snapshot().tally.ended[Outcome.REQUEST_TIMEOUT] == 1


async def test_a_first_token_that_does_not_come_in_time_is_cut() -> None:
    desk = new_desk(first_token_timeout_s=0.2)
    with pytest.raises(RequestTimeout, match="first token"):
        async with desk.admitted(new_ticket("a")):
            await asyncio.sleep(PATIENCE_S)
    assert is_empty(desk)


async def test_a_time_out_of_the_blocks_own_is_its_own() -> None:
    desk = new_desk()
    with pytest.raises(TimeoutError):
        async with desk.admitted(new_ticket("a")):
            raise TimeoutError
    assert is_empty(desk)
    assert desk.snapshot().tally.ended[Outcome.ENGINE_ERROR] == 1


# --- corrected by the backend


async def test_nobody_is_granted_what_others_use() -> None:
    desk = new_desk()
    for _ in range(2):
        desk.correct(KvReading(used_tokens=600))
    assert desk.pinned_outside_tokens == 600
    small = Stay(desk, new_ticket("small", 400))
    await until(lambda: small.is_running)
    refused = await Stay(desk, new_ticket("large", 500)).fails()
    assert isinstance(refused, Refused), "it would fit if others used less: worth another try"
    await small.end()
    desk.correct(KvReading(used_tokens=0))
    async with desk.admitted(new_ticket("large", 1000)):
        pass
    assert is_empty(desk)


async def test_a_smaller_backend_grants_less_and_takes_nothing_back() -> None:
    desk = new_desk(admission=Admission.FORECAST)
    first = Stay(desk, new_ticket("a", 600))
    await until(lambda: first.is_running)
    desk.correct(KvReading(capacity_tokens=500))
    second = Stay(desk, new_ticket("b", 400))
    await until(lambda: desk.waits("b") is not None)
    assert first.is_running
    assert not second.is_running
    desk.correct(KvReading(capacity_tokens=1000))
    await until(lambda: second.is_running)
    await first.end()
    await second.end()
    assert is_empty(desk)


# --- with a real backend behind it


class World:
    def __init__(self, backend: FakeBackend, desk: ForeignDesk) -> None:
        self.backend = backend
        self.desk = desk
        self.upstream = Upstream(UpstreamSettings(name="b", url=backend.url), CLOCK)

    async def serve(self, name: str, client: ExchangeClient, **fields: Any) -> None:
        """What a gateway does with one request."""
        exchange, ask = client.exchange, Ask(is_stream=True)
        ticket = new_ticket(name, **fields)
        watching = asyncio.create_task(exchange.watch())
        try:
            async with (
                while_client_stays(exchange),
                self.desk.admitted(ticket) as place,
                self.upstream.open(CHAT, BODY, deadline_s=ticket.deadline_s) as reply,
            ):
                await Relay(reply, ask, CLOCK, watcher=place).stream(exchange)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


BODY = msgspec.json.encode({"stream": True, "stream_options": {"include_usage": True}})


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with FakeBackend() as backend:
        world = World(backend, new_desk())
        try:
            yield world
        finally:
            await world.upstream.close()


async def test_an_answer_is_charged_and_given_back(world: World) -> None:
    client = ExchangeClient()
    await world.serve("a", client)
    assert client.reply.events[-1] == "[DONE]"
    assert is_empty(world.desk)
    assert world.desk.snapshot().tally.forecast.actual == 8


async def test_a_client_that_leaves_frees_its_room_at_once(world: World) -> None:
    world.backend.scripts.append(fake.never_ends)
    client, next_client = ExchangeClient(), ExchangeClient()
    first = asyncio.create_task(world.serve("a", client))
    await asyncio.wait_for(client.has_heard.wait(), PATIENCE_S)
    second = asyncio.create_task(world.serve("b", next_client))
    await until(lambda: world.desk.waits("b") is not None)
    client.leave()
    with pytest.raises(ClientClosed):
        await first
    await asyncio.wait_for(second, PATIENCE_S)
    assert world.backend.generations[0].is_gone.is_set(), "closed before the next one was asked"
    assert next_client.reply.events[-1] == "[DONE]"
    assert is_empty(world.desk)


async def test_who_leaves_the_line_never_reaches_the_backend(world: World) -> None:
    world.backend.scripts.append(fake.never_ends)
    client, waiting = ExchangeClient(), ExchangeClient()
    first = asyncio.create_task(world.serve("a", client))
    await asyncio.wait_for(client.has_heard.wait(), PATIENCE_S)
    second = asyncio.create_task(world.serve("b", waiting))
    await until(lambda: world.desk.waits("b") is not None)
    waiting.leave()
    with pytest.raises(ClientClosed):
        await second
    client.leave()
    await asyncio.gather(first, return_exceptions=True)
    assert len(world.backend.generations) == 1
    assert is_empty(world.desk)


async def test_a_deadline_closes_the_backend(world: World) -> None:
    world.backend.script = fake.never_ends
    with pytest.raises(RequestTimeout):
        await world.serve("a", ExchangeClient(), deadline_s=CLOCK.now() + 1.0)
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)
    assert is_empty(world.desk)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_every_ticket_ends_once(world: World, seed: int) -> None:
    chance = Random(seed)
    scripts = (
        fake.streams(8), fake.streams(8, split=5), fake.never_ends, fake.hangs_up,
        fake.begins(3, Wire.reset), fake.begins(4, Wire.drop), fake.fails(500), fake.fails(429),
        fake.never_answers,
    )  # fmt: skip
    world.desk = new_desk(3000, max_waiting_queue=12, queue_timeout_s=1.0, request_timeout_s=2.0)

    async def one(name: str) -> None:
        client = ExchangeClient()
        serving = asyncio.create_task(
            world.serve(name, client, tokens=chance.choice([200, 700, 1500]),
                        tenant=chance.choice("xyz"), deadline_s=CLOCK.now() + 2.0)
        )  # fmt: skip
        if chance.random() < 0.4:
            await asyncio.sleep(chance.uniform(0, 0.3))
            client.leave()
        done = await asyncio.gather(serving, return_exceptions=True)
        expected = (ClientClosed, Refused, RequestTimeout, AttemptFailed)
        assert done[0] is None or isinstance(done[0], expected), (seed, done)

    world.backend.scripts.extend(chance.choice(scripts) for _ in range(40))
    async with asyncio.timeout(3 * PATIENCE_S):
        await asyncio.gather(*(one(f"r{index}") for index in range(40)))
    assert is_empty(world.desk)
    await until(lambda: all(
        one.is_gone.is_set() or one.is_answered.is_set() for one in world.backend.generations
    ))  # fmt: skip

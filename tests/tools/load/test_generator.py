"""On time whatever comes back, charged from when it was due, bounded: in exact, virtual time."""

import asyncio
from collections.abc import Iterator

import pytest

from kvota.tools.load.asked import UNFINISHED, Asked, Seen
from kvota.tools.load.generator import Generator, Run
from kvota.tools.load.lag import Lag
from kvota.tools.load.measure import Slo, measure
from tests.tools.load.virtual_time import LoopClock, in_virtual_time


class FakeServer:
    """Serves `num_places` requests at once, each for `service_s`. Looks like a sender."""

    def __init__(self, service_s: float, num_places: int = 10**6, *, refuses: bool = False) -> None:
        self.service_s = service_s
        self.refuses = refuses
        self.num_open = self.num_open_max = 0
        self._num_places = num_places
        self._places: asyncio.Semaphore | None = None

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        clock = LoopClock()
        assert origin_s is not None
        assert until_s is not None
        self._places = self._places or asyncio.Semaphore(self._num_places)
        due_s = origin_s + asked.scheduled_s
        sent_s = clock.now() - due_s
        self.num_open += 1
        self.num_open_max = max(self.num_open, self.num_open_max)
        code = None
        try:
            async with asyncio.timeout(until_s - clock.now()), self._places:
                await asyncio.sleep(0.0 if self.refuses else self.service_s)
        except TimeoutError:
            code = UNFINISHED
        self.num_open -= 1
        ended_s = clock.now() - due_s
        refused = "queue_full" if self.refuses else code
        return Seen(
            scheduled_s=asked.scheduled_s, sent_s=sent_s, ended_s=ended_s, code=refused,
            first_token_s=None if refused else ended_s, status=503 if self.refuses else 200,
            retry_after_s=1.0 if self.refuses else None, output_tokens=1, max_tokens=1,
        )  # fmt: skip


def asked_at(*moments: float) -> list[Asked]:
    return [Asked(scheduled_s=at, prompt="x", max_tokens=1) for at in moments]


def offered(
    server: FakeServer, asked: list[Asked], *, drain_s: float = 60.0, in_flight_max: int = 1000
) -> Run:
    generator = Generator(server, LoopClock(), in_flight_max=in_flight_max)
    last_s = asked[-1].scheduled_s
    return in_virtual_time(generator.offer(asked, duration_s=last_s, drain_s=drain_s))


def endless() -> Iterator[Asked]:
    while True:
        yield Asked(prompt="x", max_tokens=1)


def test_a_slow_server_does_not_slow_the_generator() -> None:
    run = offered(FakeServer(service_s=100.0), asked_at(0, 0.5, 1.0, 7.25))
    assert [one.sent_s for one in run.seen] == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert [one.code for one in run.seen] == [UNFINISHED] * 4


def test_waiting_at_the_generator_is_charged_and_the_missed_rate_is_told() -> None:
    """0.4 s an answer, 5/s for 10 requests, one connection: mean 1.30 s and not 0.40 s."""
    moments = [number / 5 for number in range(10)]
    run = offered(FakeServer(service_s=0.4), asked_at(*moments), in_flight_max=1)
    service = [one.service_s for one in run.seen]
    total = [one.ended_s for one in run.seen]
    assert sum(service) / 10 == pytest.approx(0.40)
    assert sum(total) / 10 == pytest.approx(1.30)
    assert max(total) == pytest.approx(2.20)
    measured = measure(run.seen, 5.0, (0.0, 2.0), Slo(9, 9), run.lag)
    assert measured.is_rate_missed
    assert measured.service is not None
    assert measured.total is not None
    assert (measured.service.mean, measured.total.mean) == pytest.approx((0.40, 1.30))
    complaint = run.lag.complaint(0.4, 0.4)
    assert complaint is not None
    assert "the generator was the bottleneck: it sent" in complaint


def test_what_never_found_a_place_is_unfinished_and_all_lag() -> None:
    run = offered(FakeServer(service_s=50), asked_at(0, 1, 2), drain_s=10, in_flight_max=1)
    assert [one.code for one in run.seen] == [UNFINISHED] * 3
    assert [one.sent_s for one in run.seen] == pytest.approx([0, 11, 10])


def interrupted(*, keeps: bool, after_s: float = 2.5) -> Run:
    """A request each second, of 1 s each."""
    server = FakeServer(1.0)

    async def offer() -> Run:
        generator = Generator(server, LoopClock())
        task = asyncio.create_task(
            generator.offer(asked_at(0, 1, 2, 3), duration_s=4, drain_s=60, keeps=keeps)
        )
        asyncio.get_running_loop().call_later(after_s, task.cancel)
        return await task

    return in_virtual_time(offer())


def test_a_run_that_is_interrupted_keeps_what_was_seen_until_then() -> None:
    run = interrupted(keeps=True)
    assert run.interrupted_s == pytest.approx(2.4)
    assert [one.code for one in run.seen] == [None, None, UNFINISHED]
    assert run.seen[2].ended_s == pytest.approx(0.4)
    drained = interrupted(keeps=True, after_s=3.6)
    assert [one.code for one in drained.seen] == [None, None, None, UNFINISHED]


def test_without_being_told_to_keep_anything_an_interruption_goes_on() -> None:
    with pytest.raises(asyncio.CancelledError):
        interrupted(keeps=False)


def test_a_closed_loop_keeps_as_many_open_and_gives_up_the_rest() -> None:
    server = FakeServer(service_s=3.0)
    generator = Generator(server, LoopClock())
    run = in_virtual_time(generator.keep(endless(), 4, seconds=10.0))
    assert server.num_open_max == 4
    assert sum(one.is_whole for one in run.seen) == 12
    assert sum(one.is_unfinished for one in run.seen) == 4


def test_a_closed_loop_ends_after_as_many_as_were_wanted() -> None:
    generator = Generator(FakeServer(service_s=0.1), LoopClock())
    run = in_virtual_time(generator.keep(endless(), 3, seconds=1e6, num_max=7))
    assert len(run.seen) == 7
    assert run.seen[-1].ended_s == pytest.approx(0.1)


def test_a_closed_loop_that_is_refused_waits_as_it_was_told() -> None:
    generator = Generator(FakeServer(service_s=0.1, refuses=True), LoopClock())
    run = in_virtual_time(generator.keep(endless(), 1, seconds=9.5))
    assert len(run.seen) == 10


def test_every_answer_is_told() -> None:
    told: list[Seen] = []
    generator = Generator(FakeServer(1.0), LoopClock(), on_ended=told.append)
    asked = asked_at(0, 1, 2)
    in_virtual_time(generator.offer(asked, duration_s=2, drain_s=5))
    assert len(told) == 3


@pytest.mark.parametrize(
    ("lag", "is_refused"),
    [
        (Lag(), False),
        (Lag(sent_p50_s=0.004, sent_p99_s=0.005), False),
        (Lag(sent_p50_s=0.009, sent_p99_s=0.049), False),
        (Lag(sent_p50_s=0.011), True),
        (Lag(sent_p99_s=0.051), True),
        (Lag(beat_p50_s=0.011), True),
        (Lag(beat_p99_s=0.051), True),
    ],
)
def test_a_lag_above_a_tenth_of_the_ttft_refuses_the_result(lag: Lag, is_refused: bool) -> None:
    assert (lag.complaint(ttft_p50_s=0.1, ttft_p99_s=0.5) is not None) is is_refused


def test_the_beat_notices_a_loop_that_is_busy() -> None:
    class Busy(FakeServer):
        async def send(
            self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
        ) -> Seen:
            loop = asyncio.get_running_loop()
            loop._still.now_s += 0.3  # type: ignore[attr-defined] # as if it computed for so long
            return await super().send(asked, origin_s, until_s)

    run = offered(Busy(service_s=0.1), asked_at(*(number * 0.5 for number in range(20))))
    assert run.lag.beat_p99_s == pytest.approx(0.3, abs=0.02)
    assert run.lag.sent_p99_s < 0.31

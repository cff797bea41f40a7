"""Random tickets, leavings, deadlines and pauses at random moments; the desk checked each time."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvota.core.request import Band
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Queued, Refused
from tests.desk.desk_world import DeskWorld, new_ticket

NUM_WORLDS = 200
PATIENCE_STEPS = 700  # in which somebody must end while anything is there

desk_settings = st.builds(
    DeskSettings,
    admission=st.sampled_from(Admission),
    risk=st.sampled_from([0.0, 2.0, 5.0]),
    max_running_requests=st.sampled_from([12, 4]),
    max_waiting_queue=st.sampled_from([40, 40, 3, 0]),
    long_request_threshold=st.sampled_from([30, 10, 50]),
    long_request_concurrency=st.integers(1, 4),
    long_kv_share=st.sampled_from([0.2, 0.5, 1.0]),
    batch_floor=st.sampled_from([0.0, 0.1, 0.5]),
    tenant_weights=st.just({"bob": 3.0}),
    queue_timeout_s=st.sampled_from([60.0, 5.0, 0.5]),
    request_timeout_s=st.just(60.0),
    first_token_timeout_s=st.sampled_from([None, None, 1.0]),
    preempt_after_s=st.sampled_from([0.3, 0.0, 2.0]),
    preempt_min_run_s=st.sampled_from([0.2, 0.0]),
    preemptions_max=st.sampled_from([2, 1, 0]),
)
tickets = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["ann", "bob", "cid"]),
        "model": st.sampled_from(["", "other"]),
        "band": st.sampled_from(Band),
        "prompt_tokens": st.sampled_from([1, 8, 17, 40, 64]),
        "max_tokens": st.sampled_from([1, 10, 40, 90]),
        "n": st.sampled_from([1, 1, 1, 1, 1, 2, 3, 13]),
        "cached_tokens": st.just(0),
        "shared": st.integers(0, 4),
        "patience_s": st.sampled_from([None, None, 0.3, 3.0]),
    }
)


@settings(
    max_examples=NUM_WORLDS,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
class RandomDesks(RuleBasedStateMachine):
    @initialize(
        desk=desk_settings,
        capacity_tokens=st.sampled_from([160, 96, 320]),
        block_size=st.sampled_from([1, 4, 16]),
        confirm_late=st.booleans(),
        history=st.lists(st.integers(1, 60), max_size=60),
    )
    def start(
        self,
        desk: DeskSettings,
        capacity_tokens: int,
        block_size: int,
        confirm_late: bool,
        history: list[int],
    ) -> None:
        self.settings = desk
        self.capacity_tokens = capacity_tokens
        forecast = Forecast(window=50, thin_below=10)
        group = forecast.group("", "ann", "short")
        for length in history:
            forecast.observe(group, length)
        self.world = DeskWorld(
            Desk(self.capacity_tokens, desk, forecast, block_size=block_size),
            block_size=block_size,
            confirm_late=confirm_late,
        )
        self.forecast = forecast
        self.num_arrived = 0
        self.has_shared = False

    @rule(burst=st.lists(st.tuples(tickets, st.sampled_from([90, 30, 5])), min_size=1, max_size=6))
    def arrive(self, burst: list[tuple[dict[str, Any], int]]) -> None:
        for wanted, length in burst:
            self.arrive_one(wanted, length)

    def arrive_one(self, wanted: dict[str, Any], length: int) -> None:
        fields = dict(wanted)
        shared, patience_s = fields.pop("shared"), fields.pop("patience_s")
        shared = min(shared, fields["prompt_tokens"] // self.world.block_size)
        self.has_shared |= shared > 0
        self.num_arrived += 1
        now = self.world.now
        ticket = new_ticket(
            str(self.num_arrived),
            arrived_s=now,
            prefix_blocks=list(range(shared)),
            deadline_s=None if patience_s is None else now + patience_s,
            **(fields | {"cached_tokens": shared * self.world.block_size}),
        )
        verdict = self.world.arrive(ticket, length)
        if isinstance(verdict, Queued):
            assert 0 <= verdict.position <= len(self.world.tickets)
            assert verdict.eta_s >= 0
            assert self.world.desk.position(ticket.id, now) is not None
        elif isinstance(verdict, Refused):
            assert 1 <= verdict.retry_after_s <= 120

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        self.world.run(num_steps)

    @precondition(lambda self: self.world.tickets)
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        names = list(self.world.tickets)
        self.world.cancel(names[index % len(names)])

    @precondition(lambda self: self.world.tickets)
    @rule(index=st.integers(0, 99), held_blocks=st.integers(0, 9))
    def hear_from_the_engine(self, index: int, held_blocks: int) -> None:
        """An engine that tells private blocks; only where no bound is to be proved by it."""
        running = sorted(self.world.produced)
        if running and self.settings.admission is not Admission.RESERVE:
            name = running[index % len(running)]
            tokens = held_blocks * self.world.block_size
            produced = self.world.produced[name]
            self.world.desk.progress(name, produced, self.world.now, private_tokens=tokens)
            self.world.desk.check()

    @invariant()
    def reserve_is_never_exceeded(self) -> None:
        if hasattr(self, "world") and self.settings.admission is Admission.RESERVE:
            snapshot = self.world.desk.snapshot()
            assert snapshot.peak_tokens <= self.capacity_tokens
            if not self.has_shared:
                assert self.world.held_tokens() <= self.capacity_tokens

    @invariant()
    def what_is_told_adds_up(self) -> None:
        if hasattr(self, "world"):
            snapshot = self.world.desk.snapshot()
            num_here = sum(snapshot.running.values()) + sum(snapshot.waiting.values())
            assert num_here == len(self.world.tickets) - len(self.world.outcomes)
            assert (snapshot.held_after_end_tokens == 0) or self.world.stopping
            assert sum(snapshot.running.values()) == len(self.world.produced)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.drain()
        world = self.world
        assert all(count == 1 for count in world.endings.values())
        assert set(world.endings) == set(world.tickets)
        snapshot = world.desk.snapshot()
        assert snapshot.held_tokens == snapshot.pinned_tokens == snapshot.num_choices == 0
        assert dict(snapshot.tally.ended) == {
            outcome: list(world.outcomes.values()).count(outcome)
            for outcome in set(world.outcomes.values())
        }
        self.forecast.check()

    def drain(self) -> None:
        """Everything ends; somebody always ends before long, so nobody is stuck."""
        num_ended, since = len(self.world.outcomes), 0
        while len(self.world.outcomes) < len(self.world.tickets):
            self.world.step()
            since += 1
            if len(self.world.outcomes) > num_ended:
                num_ended, since = len(self.world.outcomes), 0
            assert since < PATIENCE_STEPS, "nobody ends any more"


TestRandomDesks = RandomDesks.TestCase

"""The ledger after any history, against one that was written anew."""

from bisect import bisect_left
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvota.desk.forecast import Forecast
from kvota.desk.ledger import Claim, Ledger
from kvota.desk.policies import new_policy
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Ticket
from tests.desk.desk_world import new_ticket

CAPACITY = 1_000


def new_ledger(admission: Admission = Admission.RESERVE, block_size: int = 1) -> Ledger:
    policy = new_policy(DeskSettings(admission=admission), Forecast(), block_size)
    return Ledger(CAPACITY, policy, block_size=block_size)


def claim_of(ledger: Ledger, ticket: Ticket, produced: int = 0, *, is_long: bool = False) -> Claim:
    return ledger.claim(ticket, 0, produced=produced, num_open=ticket.n, is_long=is_long)


def add(ledger: Ledger, ticket_id: str, *, is_long: bool = False, **fields: Any) -> None:
    ledger.add(ticket_id, claim_of(ledger, new_ticket(ticket_id, **fields), is_long=is_long))


def test_a_prefix_that_several_leases_name_is_charged_once() -> None:
    ledger = new_ledger(block_size=10)
    for name in ("a", "b"):
        add(ledger, name, prompt_tokens=35, max_tokens=5, prefix_blocks=["x", "y"])
    assert ledger.pinned_tokens == 20
    assert ledger.peak() == 20 + 2 * 20
    third = claim_of(ledger, new_ticket(prompt_tokens=35, max_tokens=5, prefix_blocks=["x", "z"]))
    assert ledger.peak([third]) == 30 + 3 * 20
    ledger.drop("a")
    assert ledger.pinned_tokens == 20
    ledger.drop("b")
    assert ledger.pinned_tokens == 0
    ledger.check()


def test_leaving_out_leases_counts_their_prefix_only_where_others_name_it() -> None:
    ledger = new_ledger(block_size=10)
    add(ledger, "a", prompt_tokens=20, max_tokens=10, prefix_blocks=["x", "y"])
    add(ledger, "b", prompt_tokens=10, max_tokens=10, prefix_blocks=["x"])
    assert ledger.peak(without=["b"]) == 20 + 10
    assert ledger.peak(without=["a"]) == 10 + 10
    assert ledger.peak(without=["a", "b"]) == 0
    again = claim_of(ledger, new_ticket(prompt_tokens=10, max_tokens=10, prefix_blocks=["y"]))
    assert ledger.peak([again], without=["a"]) == 20 + 2 * 10


def test_what_the_engine_tells_to_be_private_replaces_the_prompt_as_priced() -> None:
    ledger = new_ledger(block_size=10)
    add(ledger, "a", prompt_tokens=40, max_tokens=20)
    assert ledger.held_by("a") == 40
    ledger.grow("a", 5, 1, private_tokens=20)  # others share three of its blocks now
    assert ledger.held_by("a") == 20
    assert ledger.peak() == 10 + 20


def test_the_long_lane_pays_for_the_prefixes_it_names() -> None:
    ledger = new_ledger(block_size=10)
    add(ledger, "short", prompt_tokens=100, max_tokens=10)
    add(ledger, "long", is_long=True, prompt_tokens=50, max_tokens=10, prefix_blocks=["x", "y"])
    claim = claim_of(ledger, new_ticket(prompt_tokens=30, max_tokens=10), is_long=True)
    assert ledger.long_peak(claim) == (20 + 30 + 10) + (30 + 10)


def test_the_most_a_ticket_can_need_is_in_whole_blocks_for_every_choice() -> None:
    ledger = new_ledger(block_size=16)
    assert ledger.need_max(new_ticket(prompt_tokens=20, max_tokens=12)) == 32
    assert ledger.need_max(new_ticket(prompt_tokens=20, max_tokens=13)) == 48
    assert ledger.need_max(new_ticket(prompt_tokens=20, max_tokens=12, n=3)) == 16 + 3 * 16


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("is_at_end", [False, True])
def test_ample_room_is_enough_for_thousands_of_leases_in_single_precision(
    admission: Admission, block_size: int, is_at_end: bool
) -> None:
    chance = np.random.default_rng(7)
    ledger = new_ledger(admission, block_size)
    for number in range(3_000):
        prompt, most = chance.integers(1, 100_000, 2).tolist()
        num_choices = 1 + number % 2
        add(ledger, str(number), prompt_tokens=prompt, max_tokens=most, n=num_choices)
        if is_at_end:  # then holds all it ever will, to which some policies add a margin
            ledger.grow(str(number), most, num_choices, None)
    claim = claim_of(ledger, new_ticket(prompt_tokens=777, max_tokens=5_000))
    ledger.capacity_tokens = least_ample_capacity(ledger, claim)
    assert ledger.peak([claim]) <= ledger.capacity_tokens
    assert ledger.fits([claim])


def least_ample_capacity(ledger: Ledger, claim: Claim) -> int:
    """The smallest capacity of which the ledger says, without a look ahead, that it is enough."""
    before = ledger.capacity_tokens

    def is_ample(capacity: int) -> bool:
        ledger.capacity_tokens = capacity
        return ledger.has_ample_room([claim])

    try:
        return bisect_left(range(2**40), True, key=is_ample)
    finally:
        ledger.capacity_tokens = before


def test_without_ample_room_the_future_decides() -> None:
    ledger = new_ledger()
    add(ledger, "a", prompt_tokens=400, max_tokens=100)
    just = claim_of(ledger, new_ticket(prompt_tokens=400, max_tokens=100))
    assert not ledger.has_ample_room([just])
    assert ledger.fits([just])
    assert not ledger.fits([claim_of(ledger, new_ticket(prompt_tokens=400, max_tokens=101))])


def test_a_ledger_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="no KV"):
        Ledger(0, new_policy(DeskSettings(), Forecast(), 1))


@settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
class RandomLeases(RuleBasedStateMachine):
    """Leases come, grow and go; the price kept must be the price computed anew."""

    @initialize(admission=st.sampled_from(Admission), block_size=st.sampled_from([1, 4, 16]))
    def start(self, admission: Admission, block_size: int) -> None:
        self.block_size = block_size
        self.forecast = Forecast(thin_below=1)
        self.group = self.forecast.group("model", "ann", "short")
        for length in (3, 9, 20, 40):
            self.forecast.observe(self.group, length)
        self.policy = new_policy(DeskSettings(admission=admission), self.forecast, block_size)
        self.ledger = Ledger(CAPACITY, self.policy, block_size=block_size)
        self.leases: dict[str, tuple[Ticket, int]] = {}
        self.num_added = 0

    @rule(
        prompt=st.integers(1, 80),
        max_tokens=st.integers(1, 100),
        n=st.integers(1, 3),
        prefix=st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=4),
    )
    def add(self, prompt: int, max_tokens: int, n: int, prefix: list[str]) -> None:
        self.num_added += 1
        ticket = new_ticket(
            str(self.num_added),
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            n=n,
            prefix_blocks=prefix[: prompt // self.block_size],
        )
        self.leases[ticket.id] = (ticket, 0)
        self.ledger.add(ticket.id, self.claim(self.ledger, ticket, 0))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), more=st.integers(0, 20))
    def grow(self, index: int, more: int) -> None:
        ticket, produced = self.pick(index)
        produced = min(produced + more, ticket.max_tokens)
        self.leases[ticket.id] = (ticket, produced)
        self.ledger.grow(ticket.id, produced, ticket.n, None)

    @precondition(lambda self: self.leases)
    @rule(
        index=st.integers(0, 99),
        produced=st.integers(0, 200),
        num_open=st.integers(1, 3),
        private=st.none() | st.integers(0, 300),
    )
    def grow_and_go(self, index: int, produced: int, num_open: int, private: int | None) -> None:
        """Whatever an engine may say of a lease; what a new ledger cannot know is left again."""
        ticket, before = self.pick(index)
        self.ledger.grow(ticket.id, max(produced, before), num_open, private)
        self.ledger.check()
        self.ample_room_is_never_said_in_vain()
        del self.leases[ticket.id]
        self.ledger.drop(ticket.id)

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99))
    def drop(self, index: int) -> None:
        ticket, _ = self.pick(index)
        del self.leases[ticket.id]
        self.ledger.drop(ticket.id)

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99))
    def leave_one_out(self, index: int) -> None:
        ticket, _ = self.pick(index)
        without = self.ledger.peak(without=[ticket.id])
        assert without == pytest.approx(self.anew(leaving_out=ticket.id).peak())

    @invariant()
    def is_what_a_new_ledger_says(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()
            new = self.anew()
            claim = self.claim(new, new_ticket("extra", max_tokens=30), 0)
            assert self.ledger.peak([claim]) == pytest.approx(new.peak([claim]))
            assert self.ledger.peak() <= self.ledger.peak([claim]) + 1e-9

    @invariant()
    def ample_room_is_never_said_in_vain(self) -> None:
        if hasattr(self, "ledger"):
            claim = self.claim(self.ledger, new_ticket("extra", max_tokens=30, n=2), 0)
            least = least_ample_capacity(self.ledger, claim)
            assert self.ledger.peak([claim]) <= least

    def pick(self, index: int) -> tuple[Ticket, int]:
        return list(self.leases.values())[index % len(self.leases)]

    def claim(self, ledger: Ledger, ticket: Ticket, produced: int) -> Claim:
        return ledger.claim(ticket, self.group, produced=produced, num_open=ticket.n, is_long=False)

    def anew(self, leaving_out: str = "") -> Ledger:
        ledger = Ledger(CAPACITY, self.policy, block_size=self.block_size)
        for ticket, produced in self.leases.values():
            if ticket.id != leaving_out:
                ledger.add(ticket.id, self.claim(ledger, ticket, produced))
        return ledger


TestRandomLeases = RandomLeases.TestCase

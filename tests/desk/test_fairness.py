"""Counters, lifts and order, against the plain statement of VTC."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvota.desk.fairness import FairQueue, LeastServed, Rank, TenantCounters


@dataclass(frozen=True)
class Waiting:
    tenant: str
    rank: Rank


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "discard", "serve", "ask"]),
            st.sampled_from("abcde"),
            st.integers(1, 9),
        )
    )
)
def test_the_least_served_is_the_minimum_whatever_rises_meanwhile(
    steps: list[tuple[str, str, int]],
) -> None:
    counters = dict.fromkeys("abcde", 0.0)
    least = LeastServed(lambda tenant: counters[tenant])
    there: set[str] = set()
    for step, tenant, amount in steps:
        if step == "add":
            least.add(tenant)
            there.add(tenant)
        elif step == "discard":
            least.discard(tenant)
            there.discard(tenant)
        elif step == "serve":
            counters[tenant] += amount
        first = least.first()
        assert (first is None) == (not there)
        if first is not None:
            assert first in there
            assert counters[first] == min(counters[one] for one in there)


def test_a_tenant_that_was_idle_is_lifted_to_the_least_served_in_line() -> None:
    counters = TenantCounters()
    counters.enter("ann", 1.0)
    counters.enter("bob", 1.0)
    counters.charge("ann", 100.0)
    counters.charge("bob", 70.0)
    counters.enter("cid", 1.0)
    assert counters.counter("cid") == 70.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 9)))
)
def test_passing_by_an_empty_line_is_standing_in_it_for_no_time(
    visits: list[tuple[str, float, int]],
) -> None:
    stood, passed = TenantCounters(), TenantCounters()
    for tenant, weight, service in visits:
        stood.enter(tenant, weight)
        stood.leave(tenant)
        passed.pass_by(tenant, weight)
        for counters in (stood, passed):
            counters.charge(tenant, service)
    assert [stood.counter(one) for one in "abc"] == [passed.counter(one) for one in "abc"]


def test_a_tenant_that_comes_to_an_empty_line_is_lifted_to_the_last_that_left_it() -> None:
    counters = TenantCounters()
    counters.enter("ann", 1.0)
    counters.charge("ann", 50.0)
    counters.leave("ann")
    counters.enter("bob", 1.0)
    assert counters.counter("bob") == 50.0


def test_a_lift_never_takes_anything_away() -> None:
    counters = TenantCounters()
    counters.enter("ann", 1.0)
    counters.charge("ann", 100.0)
    counters.leave("ann")
    counters.enter("bob", 1.0)
    counters.enter("ann", 1.0)
    assert counters.counter("ann") == 100.0


def test_service_counts_less_for_a_heavier_tenant() -> None:
    counters = TenantCounters()
    counters.enter("ann", 4.0)
    counters.charge("ann", 100.0)
    assert counters.counter("ann") == 25.0


def test_idle_tenants_are_forgotten_when_there_are_many() -> None:
    counters = TenantCounters()
    for number in range(5_000):
        counters.enter(str(number), 1.0)
        counters.charge(str(number), 1.0)
        counters.leave(str(number))
    assert len(counters) <= 1_025


def test_inside_a_tenant_the_earliest_deadline_is_first_and_then_arrival() -> None:
    queue: FairQueue[Waiting] = FairQueue(TenantCounters())
    late, early, same = (Waiting("ann", rank) for rank in ((9.0, 0), (5.0, 1), (5.0, 2)))
    for entry in (late, same, early):
        queue.push(entry)
    served = []
    while queue.head is not None:
        served.append(queue.head)
        queue.remove(queue.head)
    assert served == [early, same, late]


def test_the_tenant_with_the_least_service_is_first() -> None:
    counters = TenantCounters()
    queue: FairQueue[Waiting] = FairQueue(counters)
    for number, tenant in enumerate(("ann", "ann", "bob")):
        counters.enter(tenant, 1.0)
        queue.push(Waiting(tenant, (0.0, number)))
    counters.charge("ann", 10.0)
    assert queue.head == Waiting("bob", (0.0, 2))
    counters.charge("bob", 20.0)
    assert queue.head == Waiting("ann", (0.0, 0))


def test_all_of_a_line_of_many_tenants_are_told_their_places_in_one_go() -> None:
    class Counted(TenantCounters):
        num_looks = 0

        def counter(self, tenant: str) -> float:
            self.num_looks += 1
            return super().counter(tenant)

    counters = Counted()
    queue: FairQueue[Waiting] = FairQueue(counters)
    entries = [Waiting(f"t{number}", (0.0, number)) for number in range(200)]
    for entry in entries:
        counters.enter(entry.tenant, 1.0)
        queue.push(entry)
        counters.charge(entry.tenant, -entry.rank[1] % 7)
    counters.num_looks = 0
    places = sorted(queue.num_before(entry) for entry in entries)
    assert places[0] == 0
    assert counters.num_looks <= 2 * len(entries)
    counters.charge("t0", 100.0)
    assert queue.num_before(entries[0]) == 199


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=15))
def test_the_position_is_the_turn_when_all_are_served_alike(
    arrivals: list[tuple[str, int]],
) -> None:
    """Equal tickets, equal weights: serving one of each tenant in turn gives the positions."""
    counters = TenantCounters()
    queue: FairQueue[Waiting] = FairQueue(counters)
    entries = []
    for number, (tenant, due) in enumerate(arrivals):
        counters.enter(tenant, 1.0)
        entries.append(Waiting(tenant, (float(due), number)))
        queue.push(entries[-1])
    for number, tenant in enumerate("abc"):
        counters.charge(tenant, number / 10)
    positions = {entry: queue.num_before(entry) for entry in entries}
    for turn in range(len(entries)):
        head = queue.head
        assert head is not None
        assert positions[head] == turn
        queue.remove(head)
        counters.leave(head.tenant)
        counters.charge(head.tenant, 1.0)

"""Whose turn it is: a virtual token counter for each tenant (VTC, OSDI'24, arXiv 2401.00588).

A counter is the service its tenant has had, divided by the tenant's weight: one for each prompt
token that had to be computed, two for each output token. The waiting tenant with the lowest
counter is next. A tenant that had nothing in line is lifted to the lowest counter of those in
line, or to that of the tenant that left the line last: idling earns no credit.

Between two tenants that wait all the time, with equal weights, in the same lane and band, service
differs by at most 2·max(w_in·L_in, w_out·M), with L_in the longest prompt and M the KV in tokens.

Inside a tenant the order is: earliest deadline, then arrival.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

W_IN = 1.0
W_OUT = 2.0
_TENANTS_KEPT = 1_024  # idle ones are forgotten beyond this

Rank = tuple[float, int]
"""(deadline or inf, place in the order of arrival): smaller is served first within a tenant."""


class InLine(Protocol):
    """What a queue needs to know of a ticket."""

    @property
    def tenant(self) -> str: ...

    @property
    def rank(self) -> Rank: ...


def rank_of(entry: InLine) -> Rank:
    return entry.rank


class LeastServed:
    """The tenant with the lowest counter among some. Counters may rise while it is in here.

    A heap of counters as they once were: an entry that has risen meanwhile is put back when it
    comes up. Amortized O(log n).
    """

    def __init__(self, counter_of: Callable[[str], float]) -> None:
        self._counter_of = counter_of
        self._tenants: set[str] = set()
        self._heap: list[tuple[float, str]] = []

    def add(self, tenant: str) -> None:
        self._tenants.add(tenant)
        heapq.heappush(self._heap, (self._counter_of(tenant), tenant))
        if len(self._heap) > 2 * len(self._tenants) + 64:
            self._heap = [(self._counter_of(one), one) for one in self._tenants]
            heapq.heapify(self._heap)

    def discard(self, tenant: str) -> None:
        self._tenants.discard(tenant)

    def first(self) -> str | None:
        heap = self._heap
        while heap:
            counter, tenant = heap[0]
            if tenant not in self._tenants:
                heapq.heappop(heap)
            elif counter < (now := self._counter_of(tenant)):
                heapq.heapreplace(heap, (now, tenant))
            else:
                return tenant
        return None


class TenantCounters:
    """The counters of all tenants, and who has tickets in line."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._waiting = LeastServed(self.counter)
        self._last_left = 0.0  # counter of the tenant that left the line last
        self._weights: dict[str, float] = {}
        self.num_changes = 0  # of counters

    def __len__(self) -> int:
        """How many tenants are remembered."""
        return len(self._counters)

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def num_waiting(self, tenant: str) -> int:
        """Tickets of the tenant in line, whatever their lane and band."""
        return self._num_waiting.get(tenant, 0)

    def enter(self, tenant: str, weight: float) -> None:
        """A ticket of the tenant joins the line, whatever its lane and band."""
        self._weights[tenant] = weight
        num = self._num_waiting.get(tenant, 0)
        self._num_waiting[tenant] = num + 1
        if num == 0:
            least = self._waiting.first()
            self._lift(tenant, self._last_left if least is None else self.counter(least))
            self._waiting.add(tenant)

    def leave(self, tenant: str) -> None:
        """A ticket of the tenant has left the line, served or not."""
        self._num_waiting[tenant] -= 1
        if self._num_waiting[tenant] == 0:
            del self._num_waiting[tenant]
            self._waiting.discard(tenant)
            self._last_left = self.counter(tenant)

    def pass_by(self, tenant: str, weight: float) -> None:
        """What `enter` and then `leave` come to while nobody is in line."""
        self._weights[tenant] = weight
        self._lift(tenant, self._last_left)
        self._last_left = self._counters[tenant]

    def charge(self, tenant: str, service: float) -> None:
        """The tenant has had `service` more, in weighted tokens."""
        self._counters[tenant] = self.counter(tenant) + service / self.weight(tenant)
        self.num_changes += 1

    def _lift(self, tenant: str, floor: float) -> None:
        """Idling earns no credit. Whoever else idles below the floor need not be remembered."""
        self._counters[tenant] = max(self.counter(tenant), floor)
        self.num_changes += 1
        if len(self._counters) > _TENANTS_KEPT:
            self._forget_idle(floor, but=tenant)

    def _forget_idle(self, floor: float, *, but: str) -> None:
        """Whoever is not in line and not above the floor would be lifted to it anyway."""
        for tenant, counter in list(self._counters.items()):
            if counter <= floor and tenant not in self._num_waiting and tenant != but:
                del self._counters[tenant]
                self._weights.pop(tenant, None)


Entry = TypeVar("Entry", bound=InLine)


class FairQueue(Generic[Entry]):
    """The fresh tickets of one lane and band.

    Adding, removing and finding the first compare O(log n) tickets.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._queues: dict[str, list[Entry]] = {}  # by rank; none is empty
        self._tenants = LeastServed(counters.counter)
        self._num = 0
        self._services: list[float] | None = None  # counters of its tenants, least first,
        self._services_at = 0  # as they were after so many changes

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Entry]:
        for queue in self._queues.values():
            yield from queue

    @property
    def head(self) -> Entry | None:
        """The next to be served."""
        tenant = self._tenants.first()
        return None if tenant is None else self._queues[tenant][0]

    def push(self, entry: Entry) -> None:
        queue = self._queues.get(entry.tenant)
        if queue is None:
            self._queues[entry.tenant] = [entry]
            self._tenants.add(entry.tenant)
            self._services = None
        else:
            insort(queue, entry, key=rank_of)
        self._num += 1

    def remove(self, entry: Entry) -> None:
        queue = self._queues[entry.tenant]
        place = self._place(queue, entry)
        del queue[place]
        if not queue:
            del self._queues[entry.tenant]
            self._tenants.discard(entry.tenant)
            self._services = None
        self._num -= 1

    def num_before(self, entry: Entry) -> int:
        """How many tickets are expected to be served before this one.

        Those of its own tenant that come first; and for each of them, and for itself where the
        other is behind on service, one of every other tenant (by weight: more or fewer).

        O(log n) for the first of a tenant until somebody is served, O(tenants) for the others: so
        all of a line of many tenants can be told where they are.
        """
        own, counters = entry.tenant, self._counters
        place = self._place(self._queues[own], entry)
        counter, weight = counters.counter(own), counters.weight(own)
        if place == 0:
            return bisect_left(self._sorted_services(), counter)
        num = place
        for tenant, queue in self._queues.items():
            if tenant != own:
                turns = int(place * counters.weight(tenant) / weight)
                num += min(len(queue), turns + (counters.counter(tenant) < counter))
        return num

    def _sorted_services(self) -> list[float]:
        if self._services is None or self._services_at != self._counters.num_changes:
            self._services = sorted(map(self._counters.counter, self._queues))
            self._services_at = self._counters.num_changes
        return self._services

    def _place(self, queue: list[Entry], entry: Entry) -> int:
        place = bisect_left(queue, entry.rank, key=rank_of)
        assert queue[place] is entry, f"a ticket of {entry.tenant} is not in line"
        return place

"""A request as a ticket for the desk: its exact price in KV tokens, cached prefix blocks apart."""

from collections.abc import Hashable, Sequence

from kvota.core.request import Request
from kvota.desk.ticket import Ticket
from kvota.edge.trust import ANONYMOUS
from kvota.kv.cache import KVCache

CLIENT_ID = "client_id"  # the label that holds the client's own request id
TENANT = "tenant"  # the label that says whose request it is
WEIGHT = "weight"  # and how much that tenant weighs; None: what the settings say


def ticket_of(request: Request, cache: KVCache, *, model: str = "") -> Ticket:
    """`cache` tells which blocks of the prompt are in memory now.

    It may belong to another thread: it is only looked at, and what it says may be old by the time
    the request runs. The engine's own count is what is charged in the end.
    """
    prefix = _cached_prefix(request, cache)
    return Ticket(
        id=request.id,
        tenant=str(request.labels.get(TENANT, ANONYMOUS)),
        model=model,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        arrived_s=request.arrived_s,
        band=request.band,
        n=request.n,
        cached_tokens=len(prefix) * cache.block_size,
        prefix_blocks=prefix,
        weight=request.labels.get(WEIGHT),
        queue_deadline_s=request.queue_deadline_s,
        begin_by_s=request.queue_deadline_s,
        deadline_s=request.deadline_s,
    )


def _cached_prefix(request: Request, cache: KVCache) -> Sequence[Hashable]:
    if not (request.use_prefix_cache and cache.has_prefix_cache):
        return ()
    if request.prompt_logprobs is not None:
        return ()  # every position is computed, in blocks of its own
    chain = cache.chain(list(request.prompt), request.cache_salt)
    num_cached = cache.match(chain) // cache.block_size
    return [chain.hash_of(index) for index in range(num_cached)]

"""A node's finished requests as traces: under the gateway's span, or whoever's sent them."""

from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Final

from kvota.core.errors import Outcome
from kvota.node.embedding.app import EmbeddingRecord
from kvota.node.ports import RequestRecord
from kvota.telemetry.trace import Attribute, RequestTimes, TraceContext, Tracing

_NO_ATTRIBUTES: Final = frozenset({"traceparent"})


class TracedRecords:
    """A RecordRequest for traces. `unix_time` gives wall-clock seconds."""

    def __init__(self, tracing: Tracing, chance: Random, unix_time: Callable[[], float]) -> None:
        self._tracing = tracing
        self._chance = chance
        self._unix_time = unix_time

    def __call__(self, record: RequestRecord) -> None:
        context = TraceContext.begin(record.traceparent, self._chance)
        self._tracing.record(times_of(record, self._unix_time()), context)


def times_of(record: RequestRecord, ended_unix_s: float) -> RequestTimes:
    """The moments of a request that ended just now. What never had a chunk was never granted."""
    queued_s, first_s = record.queued_s, record.first_token_s
    was_granted = queued_s is not None and (first_s is not None or queued_s < record.total_s)
    last_s = None if first_s is None else first_s + (record.decode_s or 0.0)
    return RequestTimes(
        arrived_unix_s=ended_unix_s - record.total_s,
        queued_at_s=record.door_s,
        granted_at_s=queued_s if was_granted else None,
        first_token_at_s=first_s,
        last_token_at_s=last_s,
        ended_at_s=record.total_s,
        is_failed=record.outcome is not Outcome.COMPLETED,
        attributes=attributes_of(record),
    )


def attributes_of(record: RequestRecord | EmbeddingRecord) -> dict[str, Attribute]:
    """All that is known of it, but for the id of its sender's span."""
    return {
        name: value
        for name, value in asdict(record).items()
        if value is not None and name not in _NO_ATTRIBUTES
    }

"""Where the time of an embedding request went, as stages of its trace.

door ─┼─ line ─┼─ prefill ─┼─ stream ┤        prefill: the passes with its texts
                                             none of it is decoded
"""

from kvota.core.errors import Outcome
from kvota.node.embedding.app import EmbeddingRecord
from kvota.node.tracing import attributes_of
from kvota.telemetry.trace import RequestTimes


def times_of(record: EmbeddingRecord, ended_unix_s: float) -> RequestTimes:
    """The moments of a request that ended just now. No text and no vector is among them."""
    return RequestTimes(
        arrived_unix_s=ended_unix_s - record.total_s,
        queued_at_s=record.door_s,
        granted_at_s=record.queued_s,
        last_token_at_s=record.computed_s,
        ended_at_s=record.total_s,
        is_failed=record.outcome is not Outcome.COMPLETED,
        attributes={"endpoint": "embeddings", **attributes_of(record)},
    )

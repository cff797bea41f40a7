"""What a node's record says of where a request's time went."""

from dataclasses import replace
from random import Random

from kvota.core.errors import Outcome
from kvota.node.ports import RequestRecord
from kvota.node.tracing import TracedRecords, times_of
from kvota.telemetry.trace import RequestTimes, Stage, TraceContext, stages

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WHOLE = RequestRecord(
    request_id="r", endpoint="completions", model="m", tenant="t", lane="short",
    band="interactive", outcome=Outcome.COMPLETED, status=200, code=None, streamed=True,
    door_s=0.125, queued_s=0.5, first_token_s=1.0, decode_s=2.0, total_s=3.25,
    traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01",
)  # fmt: skip


def spent(record: RequestRecord) -> list[Stage]:
    return list(stages(times_of(record, ended_unix_s=1003.25)))


def test_the_stages_are_those_of_the_record() -> None:
    assert spent(WHOLE) == [
        Stage("door", 0.0, 0.125),
        Stage("line", 0.125, 0.5),
        Stage("prefill", 0.5, 1.0),
        Stage("decode", 1.0, 3.0),
        Stage("stream", 3.0, 3.25),
    ]


def test_who_never_had_a_chunk_was_in_line_to_the_end() -> None:
    expired = replace(
        WHOLE, outcome=Outcome.QUEUE_TIMEOUT, queued_s=3.25, first_token_s=None, decode_s=None
    )
    assert spent(expired) == [Stage("door", 0.0, 0.125), Stage("line", 0.125, 3.25)]
    assert times_of(expired, 0.0).is_failed


def test_who_was_turned_away_was_only_at_the_door() -> None:
    refused = replace(WHOLE, door_s=None, queued_s=None, first_token_s=None, decode_s=None)
    assert spent(refused) == [Stage("door", 0.0, 3.25)]


def test_a_record_becomes_a_span_under_that_of_its_sender() -> None:
    kept: list[tuple[RequestTimes, TraceContext]] = []

    class Kept:
        def record(self, times: RequestTimes, context: TraceContext) -> None:
            kept.append((times, context))

        def close(self) -> None:
            pass

    TracedRecords(Kept(), Random(1), lambda: 1003.25)(WHOLE)
    [(times, context)] = kept
    assert (context.trace_id, context.parent_id) == (TRACE_ID, SPAN_ID)
    assert times.arrived_unix_s == 1000.0
    assert times.attributes["request_id"] == "r"
    assert times.attributes["outcome"] == "completed"
    assert not {"traceparent", "code"} & set(times.attributes)

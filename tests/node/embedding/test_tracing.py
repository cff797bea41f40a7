"""What the record of an embedding request says of where its time went."""

from dataclasses import replace

from kvota.core.errors import Outcome
from kvota.node.embedding.app import EmbeddingRecord
from kvota.node.embedding.tracing import times_of
from kvota.telemetry.trace import Stage, stages
from tests.support.embedding_node import MODEL, PATH, embedding_node

WHOLE = EmbeddingRecord(
    request_id="r", model="m", tenant="t", outcome=Outcome.COMPLETED, status=200, code=None,
    num_texts=2, prompt_tokens=9, total_s=2.0, door_s=0.25, queued_s=0.5, computed_s=1.5,
    traceparent="theirs",
)  # fmt: skip
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spent(record: EmbeddingRecord) -> list[Stage]:
    return list(stages(times_of(record, ended_unix_s=1002.0)))


def test_the_stages_are_those_of_the_record() -> None:
    assert spent(WHOLE) == [
        Stage("door", 0.0, 0.25),
        Stage("line", 0.25, 0.5),
        Stage("prefill", 0.5, 1.5),
        Stage("stream", 1.5, 2.0),
    ]


def test_who_never_had_a_pass_was_in_line_to_the_end() -> None:
    late = replace(WHOLE, outcome=Outcome.QUEUE_TIMEOUT, queued_s=None, computed_s=None)
    assert spent(late) == [Stage("door", 0.0, 0.25), Stage("line", 0.25, 2.0)]
    assert times_of(late, 0.0).is_failed


def test_the_span_tells_what_it_was_and_not_where_it_came_from() -> None:
    times = times_of(WHOLE, 1002.0)
    assert times.arrived_unix_s == 1000.0
    assert (times.attributes["endpoint"], times.attributes["num_texts"]) == ("embeddings", 2)
    assert not {"traceparent", "code"} & set(times.attributes)


async def test_the_node_notes_every_moment_in_order() -> None:
    async with embedding_node(line={"max_wait_s": 0.05}) as node:
        body = {"model": MODEL, "input": "three little words"}
        reply = await node.caller.request("POST", PATH, body, {"traceparent": TRACEPARENT})
        assert reply.status == 200
        [kept] = node.records
        moments = [kept.door_s, kept.queued_s, kept.computed_s, kept.total_s]
        assert None not in moments
        assert moments == sorted(one for one in moments if one is not None)
        assert kept.traceparent == TRACEPARENT
        assert kept.queued_s is not None
        assert kept.door_s is not None
        assert int(reply.headers["x-kvota-queue-ms"]) == round(
            1000 * (kept.queued_s - kept.door_s)
        ) >= 50  # fmt: skip


async def test_who_is_wrong_was_only_at_the_door() -> None:
    async with embedding_node() as node:
        assert (await node.post("")).status == 400
        assert [one.name for one in stages(times_of(node.records[0], 0.0))] == ["door"]

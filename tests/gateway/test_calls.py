from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.gateway.calls import Call, Work, outcome_of_code


def call(**fields: Any) -> Call:
    made = Call(id="i", client_id="i", endpoint="chat", arrived_s=10.0, address=None)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_what_a_request_held_is_its_tokens_times_their_time() -> None:
    done = call(ended_s=15.0, queued_s=1.0, prompt_tokens=160, output_tokens=32)
    assert done.kv_block_seconds(16) == (160 + 16) / 16 * 4.0
    assert call(ended_s=15.0, prompt_tokens=160).kv_block_seconds(16) == 0.0


def test_times_are_told_from_the_arrival() -> None:
    done = call(ended_s=15.0, first_token_s=11.0, output_tokens=5)
    assert (done.total_s, done.ttft_s, done.time_per_output_token_s) == (5.0, 1.0, 1.0)
    assert call(ended_s=15.0).ttft_s is None


def test_an_embedding_is_read_and_has_no_first_token() -> None:
    answered = call(work=Work.EMBEDDING, first_token_s=11.0, prompt_tokens=7)
    assert (answered.read_tokens, answered.ttft_s, answered.is_owed) == (7, None, True)
    left = call(work=Work.EMBEDDING, has_begun=True, prompt_tokens=7)
    assert (left.read_tokens, left.is_owed) == (0, True)
    refused = call(work=Work.EMBEDDING, prompt_tokens=7)
    assert (refused.read_tokens, refused.is_owed) == (0, False)


def test_a_prompt_counts_once_something_came_of_it() -> None:
    assert call(prompt_tokens=7).read_tokens == 0
    assert call(prompt_tokens=7, output_tokens=1).read_tokens == 7


def test_a_prompt_that_was_only_scored_was_read_and_held_all_the_same() -> None:
    scored = call(prompt_tokens=160, first_token_s=11.0, ended_s=15.0, queued_s=1.0)
    assert (scored.read_tokens, scored.kv_block_seconds(16)) == (160, 40.0)
    failed = call(prompt_tokens=160, first_token_s=11.0, outcome=Outcome.QUEUE_TIMEOUT)
    assert failed.read_tokens == 0
    embedded = call(work=Work.EMBEDDING, prompt_tokens=160, first_token_s=11.0, ended_s=15.0)
    assert embedded.kv_block_seconds(16) == 0.0


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (503, "queue_full", Outcome.REFUSED),
        (503, "queue_timeout", Outcome.QUEUE_TIMEOUT),
        (504, "request_timeout", Outcome.REQUEST_TIMEOUT),
        (200, "request_timeout", Outcome.REQUEST_TIMEOUT),
        (410, "request_cancelled", Outcome.CLIENT_CLOSED),
        (400, "invalid_request", Outcome.INVALID),
        (502, "backend_error", Outcome.ENGINE_ERROR),
        (500, None, Outcome.ENGINE_ERROR),
    ],
)
def test_a_nodes_error_is_the_outcome_that_the_node_records(
    status: int, code: str | None, outcome: Outcome
) -> None:
    assert outcome_of_code(status, code) is outcome

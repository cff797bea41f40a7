"""Deltas that wait together become one, without losing anything; what ended a choice is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from kvota.core.request import Delta, FinishReason, PromptRead, Request, TokenLogprobs
from kvota.node.answer import coalesced, joined, usage_of
from tests.support.http import ended, make_node


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=2), st.integers(0, 9))))
def test_each_choice_keeps_its_text_tokens_and_logprobs_in_order(
    steps: list[tuple[int, str, int]],
) -> None:
    deltas = [
        Delta(choice, text, [token], [TokenLogprobs(token, -1.0)]) for choice, text, token in steps
    ]
    merged = coalesced([PromptRead(0), *deltas])
    assert merged[0] == PromptRead(0)
    rest = [event for event in merged if isinstance(event, Delta)]
    assert [delta.choice for delta in rest] == list(dict.fromkeys(d.choice for d in deltas))
    for delta in rest:
        mine = [step for step in steps if step[0] == delta.choice]
        assert delta.text == "".join(text for _, text, _ in mine)
        assert list(delta.token_ids) == [token for _, _, token in mine]
        assert [entry.token for entry in delta.logprobs] == [token for _, _, token in mine]


def test_the_end_of_a_choice_is_kept() -> None:
    end = Delta(0, "b", [2], finish=FinishReason.STOP, matched_stop="b")
    [merged] = coalesced([Delta(0, "a", [1]), end])
    assert isinstance(merged, Delta)
    assert (merged.text, merged.finish, merged.matched_stop) == ("ab", FinishReason.STOP, "b")


def test_usage_adds_up() -> None:
    usage = usage_of(3, 2, 4)
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 2)


def test_lists_join_and_nothing_stays_unset() -> None:
    some: list[list[int] | UnsetType] = [[1], UNSET, [2]]
    assert joined(some) == [1, 2]
    assert joined([part for part in some if part is UNSET]) is UNSET


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize(
    ("matched", "expected"),
    [("END", "END"), ("7", "7"), (9, 9), (0, 0), (2, None), (None, None)],
)
async def test_the_clients_own_stop_is_named(
    path: str, stream: bool, matched: str | int | None, expected: str | int | None
) -> None:
    def script(request: Request) -> list[Any]:
        end = Delta(0, "a", [70], finish=FinishReason.STOP, matched_stop=matched)
        return [PromptRead(0), end, ended(request, output=1)]

    call = getattr(make_node(script), path)
    reply = await call(stop=["END", "7"], stop_token_ids=[9, 0], stream=stream)
    body = reply.chunks[-1] if stream else reply.json
    assert body["choices"][0].get("stop_reason") == expected
    assert body["choices"][0]["finish_reason"] == "stop"

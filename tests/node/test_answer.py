"""Deltas that wait together become one, without losing anything."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from kvota.core.request import Delta, FinishReason, PromptRead, TokenLogprobs
from kvota.node.answer import coalesced, joined, usage_of


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

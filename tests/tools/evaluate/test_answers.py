from math import log
from typing import Any

import pytest

from kvota.tools.evaluate.answers import FOLLOWED, Dialect, Unexpected, continuation, scored
from kvota.tools.evaluate.divergence import LOGPROB_MIN


def entry(**logprobs: float) -> dict[str, Any]:
    """vLLM's form, for tokens t1, t2 …"""
    return {name[1:]: {"logprob": value, "rank": 1} for name, value in logprobs.items()}


def answer(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", **choice}], "usage": {"prompt_tokens": 3}}


def echoed(*tops: dict[str, float] | None, values: list[float | None]) -> dict[str, Any]:
    names = ["x", "b", "c", "said"][: len(values)]
    logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": list(tops)}
    return answer(logprobs=logprobs)


def test_entries_by_id_are_read_with_the_token_that_followed() -> None:
    told = answer(prompt_logprobs=[None, entry(t5=-0.5, t7=-1.0), entry(t7=-0.1)])
    positions = scored(told, Dialect.PROMPT_LOGPROBS, [1, 5, 7]).positions
    assert positions[0] is None
    assert positions[1] is not None
    assert positions[1].logprob == -0.5
    assert positions[1].top == {5: -0.5, 7: -1.0}


def test_a_token_without_its_entry_is_no_answer() -> None:
    told = answer(prompt_logprobs=[None, entry(t7=-1.0), entry(t7=-0.1)])
    with pytest.raises(Unexpected):
        scored(told, Dialect.PROMPT_LOGPROBS, [1, 5, 7])


def test_echoed_names_leave_out_what_is_said_and_what_is_ambiguous() -> None:
    broken = "\N{REPLACEMENT CHARACTER}"
    told = echoed(
        None, {"b": -0.5, broken: -1.5}, {"a": -0.2, "c": -2.0}, {"said": -0.1},
        values=[None, -0.5, -2.0, -0.1],
    )  # fmt: skip
    found = scored(told, Dialect.ECHO, [1, 2, 3])
    assert [one.top for one in found.known] == [{FOLLOWED: -0.5}, {"a": -0.2, FOLLOWED: -2.0}]
    assert list(found.names) == ["x", "b", "c"]


def test_a_server_that_does_not_echo_is_not_believed() -> None:
    names = ["some", "thing", "else", "than", "the", "prompt"]
    told = answer(logprobs={"tokens": names, "token_logprobs": [log(0.5)] * 6})
    with pytest.raises(Unexpected, match="not known here"):
        scored(told, Dialect.ECHO, None)


def test_minus_infinity_is_cut_however_it_is_written() -> None:
    told = echoed(None, {"b": -9999.0}, None, values=[None, -9999.0, -1.0])
    assert scored(told, Dialect.ECHO, [1, 2, 3]).known[0].logprob == LOGPROB_MIN


@pytest.mark.parametrize(
    "told", [{}, {"choices": []}, answer(), answer(prompt_logprobs=[None]), answer(logprobs=None)]
)
@pytest.mark.parametrize("dialect", Dialect)
def test_anything_else_is_no_answer(told: dict[str, Any], dialect: Dialect) -> None:
    with pytest.raises(Unexpected):
        scored(told, dialect, [1, 2, 3])


def test_a_continuation_is_text_and_whatever_tokens_are_told() -> None:
    assert continuation(answer(text="hi", logprobs=None)).ids is None
    told = continuation(answer(text="hi", token_ids=[4], logprobs={"tokens": ["hi"]}))
    assert (told.text, told.ids, told.names) == ("hi", [4], ["hi"])
    with pytest.raises(Unexpected):
        continuation({"error": "no"})

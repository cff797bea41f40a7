"""Single events as they pass: whatever a backend says, only what can go on goes on."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.assembly import AssembledBody, Assembler
from kvota.gateway.upstream.passage import Ask, BrokenEvent, ErrorEvent, Passage, Unwatched


class Echo:
    """A filter that lets everything through, a character late."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}

    def feed(self, stream: str, text: str) -> str:
        text = self._held.get(stream, "") + text
        self._held[stream] = text[-1:]
        return text[:-1]

    def finish(self, stream: str) -> str:
        return self._held.pop(stream, "")


def new_passage(*, is_filtered: bool = False, **ask: Any) -> Passage:
    text_filter = Echo() if is_filtered else None
    return Passage(Ask(is_stream=True, **ask), watcher=Unwatched(), text_filter=text_filter)


plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.just(0.5)
)
names = st.sampled_from(["index", "id", "function", "content", "completion_tokens", "tokens"])
json_values: st.SearchStrategy[Any] = st.recursive(
    plain_values,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
call = st.fixed_dictionaries({}, optional={
    "index": st.integers(0, 2), "id": text, "function": st.fixed_dictionaries(
        {}, optional={"name": text, "arguments": text}),
})  # fmt: skip
delta = st.fixed_dictionaries({}, optional={
    "role": st.just("assistant"), "content": st.none() | text, "reasoning": text,
    "tool_calls": st.lists(call, max_size=2), "other": json_values,
})  # fmt: skip
choice = st.fixed_dictionaries({}, optional={
    "index": st.integers(0, 1), "delta": st.none() | delta, "text": st.none() | text,
    "finish_reason": st.sampled_from([None, None, "", "stop", "length"]),
    "logprobs": json_values, "token_ids": st.lists(st.integers(0, 9), max_size=3),
})  # fmt: skip
chunk = st.fixed_dictionaries({}, optional={
    "id": text | json_values, "model": text, "object": text, "created": json_values,
    "choices": st.lists(choice, max_size=2), "usage": json_values,
    "system_fingerprint": json_values,
})  # fmt: skip
event = st.one_of(chunk, chunk, chunk, json_values).map(msgspec.json.encode) | st.binary(max_size=9)


@given(st.lists(event, max_size=8), st.booleans(), st.booleans(), st.sampled_from([None, "new"]))
def test_no_event_breaks_more_than_its_own_answer(
    events: list[bytes], is_filtered: bool, wants_usage: bool, model: str | None
) -> None:
    passage = new_passage(is_filtered=is_filtered, wants_usage=wants_usage, model=model,
                          num_choices=2)  # fmt: skip
    assembler = Assembler()
    finished: list[int] = []
    with contextlib.suppress(BrokenEvent, ErrorEvent):
        for value in events:
            passed = passage.take(value, 1.0)
            if passed is None:
                continue
            said = msgspec.json.decode(passed)
            assert model is None or said["model"] == model
            finished += [one.get("index", 0) for one in said["choices"] if one.get("finish_reason")]
            assembler.add(passed)
    assert len(finished) == len(set(finished)), "a choice ends once"
    assert passage.tally.output_tokens >= 0
    usage = passage.usage()
    assert isinstance(usage, dict)
    closing = passage.closing()
    assert closing is None or msgspec.json.decode(closing)["choices"] == []
    with contextlib.suppress(msgspec.MsgspecError):
        assert isinstance(assembler.body(usage), AssembledBody)


@given(st.lists(text, min_size=1, max_size=6))
def test_a_filter_that_holds_back_loses_nothing(texts: list[str]) -> None:
    passage = new_passage(is_filtered=True)
    out = ""
    for number, piece in enumerate(texts):
        finish = "stop" if number == len(texts) - 1 else None
        part = {"index": 0, "delta": {"content": piece}, "finish_reason": finish}
        passed = passage.take(msgspec.json.encode({"choices": [part]}), 1.0)
        assert passed is not None
        out += msgspec.json.decode(passed)["choices"][0]["delta"].get("content") or ""
    assert out == "".join(texts)


@pytest.mark.parametrize(
    ("part", "num_tokens"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, 0),
        ({"delta": {"role": "assistant"}}, 0),
        ({"delta": {}}, 0),
        ({"delta": {"content": None}}, 0),
        ({"delta": {"content": ""}}, 1),  # half a character
        ({"delta": {"content": "x"}}, 1),
        ({"delta": {"role": "assistant", "content": "x"}}, 1),
        ({"delta": {"content": ""}, "finish_reason": "stop"}, 0),
        ({"delta": {"content": "x"}, "finish_reason": "stop"}, 1),
        ({"delta": {"tool_calls": []}}, 0),
        ({"delta": {"tool_calls": [{"index": 0}]}}, 1),
        ({"text": ""}, 1),
        ({"text": "", "finish_reason": "length"}, 0),
        ({"text": "x", "token_ids": [1, 2, 3]}, 3),
        ({}, 0),
    ],
)
def test_tokens_are_counted_by_what_a_chunk_brings(part: dict[str, Any], num_tokens: int) -> None:
    passage = new_passage()
    passage.take(msgspec.json.encode({"choices": [{"index": 0, **part}]}), 1.0)
    assert passage.tally.output_tokens == num_tokens


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"[]", b"null", b"7", b'{"choices": 1}', b'{"choices": [1]}', b"\xff",
     b'{"choices": [{"index": 1}]}', b'{"choices": [{"index": -1, "text": "x"}]}',
     b'{"choices": [{"delta": {"content": 5}}]}', b'{"a":' * 2000],
)  # fmt: skip
def test_what_is_no_chunk_is_refused(value: bytes) -> None:
    with pytest.raises(BrokenEvent):
        new_passage().take(value, 1.0)

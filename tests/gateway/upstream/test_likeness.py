"""Chunks that are like an earlier one: what is said of them is what decoding says."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.assembly import Assembler
from kvota.gateway.upstream.likeness import Likeness
from kvota.gateway.upstream.passage import Ask, Passage


class Heard:
    """A watcher that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, bool]] = []

    def prompt_counted(self, num_tokens: int) -> None:
        pass

    def produced(self, choice: int, num_tokens: int, *, is_done: bool) -> None:
        self.said.append((choice, num_tokens, is_done))


class Blind(Likeness):
    """Knows nothing, so that everything is decoded."""

    def learn(self, value: bytes) -> bool:
        return False


def chat(text: str, *, index: int = 0, delta: Any = None, part: Any = None, **also: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text, **(delta or {})}, **(part or {})}
    return msgspec.json.encode({"id": "x", "model": "m", "choices": [choice], **also})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ["m", "x", '"', "\\", '","x":"', "]}", "\n", "你好", "content"]
)
flat = st.sampled_from([{}, {"usage": None}, {"created": 7}, {"usage": {"completion_tokens": 2}}])
deltas = st.sampled_from(
    [{}, {"role": "assistant"}, {"refusal": None}, {"reasoning": "r"}, {"odd": [1]}]
)
parts = st.sampled_from(
    [{}, {"finish_reason": None}, {"finish_reason": "stop"}, {"token_ids": [1, 2]},
     {"logprobs": None}, {"logprobs": {"content": [{"token": "t"}]}}]
)  # fmt: skip
shapes = st.tuples(st.integers(0, 1), deltas, parts, flat)
streams = st.lists(shapes, min_size=1, max_size=3).flatmap(
    lambda known: st.lists(st.tuples(st.sampled_from(known), texts), max_size=12)
)


def values_of(stream: list[tuple[Any, str]]) -> list[bytes]:
    return [
        chat(text, index=index, delta=delta, part=part, **also)
        for (index, delta, part, also), text in stream
    ]


@given(
    streams, st.booleans(), st.booleans(), st.sampled_from([None, "new"]),
)  # fmt: skip
def test_a_passage_says_the_same_as_one_that_decodes_everything(
    stream: list[tuple[Any, str]], wants_usage: bool, wants_running: bool, model: str | None
) -> None:
    ask = Ask(
        is_stream=True, num_choices=2, wants_usage=wants_usage,
        wants_running_usage=wants_running, model=model,
    )  # fmt: skip
    heard, heard_blind = Heard(), Heard()
    sharp, blind = Passage(ask, watcher=heard), Passage(ask, watcher=heard_blind)
    blind.likeness = Blind()
    for number, value in enumerate(values_of(stream)):
        assert sharp.take(value, number) == blind.take(value, number)
        sharp.report()
        blind.report()
        assert sharp.tally == blind.tally
    assert heard.said == heard_blind.said
    assert sharp.has_content == blind.has_content
    assert sharp.closing() == blind.closing()


@given(streams)
def test_an_answer_is_put_together_the_same(stream: list[tuple[Any, str]]) -> None:
    passage = Passage(Ask(is_stream=False, num_choices=2), watcher=Heard())
    sharp, blind = Assembler(), Assembler()
    for number, value in enumerate(values_of(stream)):
        passed = passage.take(value, number)
        if passed is None:
            continue
        blind.add(passed)
        if passage.alike_text is None:
            sharp.add(passed)
        else:
            alike = passage.likeness
            sharp.add_text(alike.choice, alike.field, passage.alike_text, len(passed))
    assert sharp.body({}) == blind.body({})
    assert sharp.num_bytes == blind.num_bytes


def learned(value: bytes) -> Likeness:
    likeness = Likeness()
    likeness.learn(value)
    return likeness


def test_only_the_text_may_differ() -> None:
    likeness = learned(chat("m", index=1))  # as the model is called, too
    assert likeness.text(chat("Hello", index=1)) == "Hello"
    assert (likeness.choice, likeness.field) == (1, "content")
    assert likeness.text(chat("你", index=1)) == "你"
    assert likeness.text(chat("Hello", index=0)) is None
    assert likeness.text(chat("", index=1)) is None


def test_completions_have_a_text_of_another_name() -> None:
    value = b'{"model": "m", "choices": [{"index": 0, "text": "%b", "finish_reason": null}]}'
    likeness = learned(value % b"a")
    assert likeness.text(value % b" b") == " b"
    assert likeness.field == "text"


@pytest.mark.parametrize("text", [b'\\"', b'"', b"\n", b"\xff", b"\x00", b'","role":"user'])
def test_a_text_that_needs_reading_is_left_to_the_decoder(text: bytes) -> None:
    head, _, tail = chat("@").partition(b"@")
    assert learned(head + b"a" + tail).text(head + text + tail) is None


@pytest.mark.parametrize(
    "value",
    [
        chat("a", part={"token_ids": [1]}),
        chat("a", part={"finish_reason": "stop"}),
        chat("a", delta={"reasoning": "b"}),
        chat("a", usage={"completion_tokens": 1}),
        chat("a", odd=[1]),
        b'{"choices":[{"delta":{"content":"a"}},{"index":1,"delta":{}}]}',
        b'{"choices":[{"delta":{"content":"a"},"logprobs":{"content":"a"}}]}',
        b'{"choices":[{"text":"a","delta":{"content":null}}]}',
    ],
)
def test_what_adds_up_otherwise_is_no_pattern(value: bytes) -> None:
    assert learned(value).text(value) is None


def test_a_stream_without_likeness_is_not_looked_at_for_ever() -> None:
    likeness = Likeness()
    for number in range(10):
        likeness.learn(chat("a", created=[number]))
    likeness.learn(chat("a"))
    assert likeness.text(chat("a")) is None

"""Chunks that are like an earlier one: what is said of them is what decoding says."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.gateway.upstream.assembly import Assembler
from kvota.gateway.upstream.likeness import Likeness
from kvota.gateway.upstream.passage import Ask, BrokenEvent, ErrorEvent, Passage


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


# Chunks as bytes, with holes for texts: laid out, repeated and nested as no encoder of ours would.
# The second hole says the same in every chunk of a stream, often by an escape.
layouts = st.sampled_from(
    [
        b'{"choices":[{"index":0,"delta":{"content":"@"}}]}',
        b'{"model": "m", "choices": [{"delta": {"content": "@"}, "index": 1}]} ',
        b'{"choices":[{"index":0,"delta":{"content":"@"}}],"usage":null,"x":"$"}',
        b'{"content":"@","choices":[{"index":0,"delta":{"content":"$"}}]}',
        b'{"text":"$","choices":[{"index":0,"text":"@","finish_reason":null}]}',
        b'{"choices":[{"index":0,"text":"@","text":"$"}]}',
        b'{"choices":[{"delta":{"content":"@","content":"$"}}]}',
        b'{"choices":[{"delta":{"content":"@"}}],"choices":[{"delta":{"content":"$"}}]}',
        b'{"choices":[{"delta":{"role":"$","content":"@"},"logprobs":null}]}',
        b'{"choices":[{"delta":{"content":"@"},"logprobs":{"content":[{"token":"$"}]}}]}',
        b'{"choices":[{"delta":{"content":"@"}},{"index":1,"delta":{"content":"$"}}]}',
        b'{"choices":[{"delta":{"content":"@"},"finish_reason":  "$"}]}',
        b'{"choices":[{"delta":{"content":"@"}}],"usage":{"completion_tokens":3,"x":"$"}}',
        b'{"choices":[{"delta":{"content":"@","tool_calls":[{"index":0,"id":"$"}]}}]}',
        b'{"choices":[{"delta":{"content":null,"reasoning":"@"},"x":"$"}]}',
        b'{"choices":[{"delta":{"content":"@","refusal":"$"}}]}',
        b'{"choices":[{"delta":{"x":"\\"content\\": \\"$\\"","content":"@"}}]}',
        b'{"choices":[{"delta":{"content":"@"}}],"error":"$"}',
        b'{"choices":[{"index":0.0,"delta":{"content":"@"}}]}',
        b'{"choices":[{"index":0,"index":1,"delta":{"content":"@"}}]}',
    ]
)
strings = st.sampled_from(
    [b"a", b"b", b"", b"\\u0061", b"\\n", b'\\"', b"\\ud83d\\ude00", b"\\ud800", b"\\", b'"',
     b"\xff", b'a","content":"b', b'a"}}],"choices":[{"delta":{"content":"b', b"]}",
     "你".encode(), b"\n", b"\x7f", b"\xed\xa0\x80", b'\\","content":"b']
)  # fmt: skip


def outcome(passage: Passage, value: bytes) -> tuple[bytes | None, Any]:
    """What the client gets, and the text as the full decoder reads it; or the failure."""
    found = passage.likeness.text(value)
    try:
        passed = passage.take(value, 1.0)
    except (BrokenEvent, ErrorEvent) as error:
        return None, type(error)
    return passed, found


@settings(max_examples=600)
@given(
    layouts, st.just(b"\\u0061") | strings,
    st.lists(st.sampled_from([b"a", b"b"]) | strings, min_size=2, max_size=6),
)  # fmt: skip
def test_bytes_laid_out_in_any_way_are_read_as_a_decoder_reads_them(
    layout: bytes, second: bytes, texts: list[bytes]
) -> None:
    ask = Ask(is_stream=True, num_choices=2, model="new")
    sharp, blind = Passage(ask, watcher=Heard()), Passage(ask, watcher=Heard())
    blind.likeness = Blind()
    for text in texts:
        value = layout.replace(b"$", second).replace(b"@", text)
        passed, found = outcome(sharp, value)
        passed_blind, failure = outcome(blind, value)
        assert passed == passed_blind
        assert sharp.tally == blind.tally
        if failure is not None:
            assert found == failure
            return
        if found is not None:
            [choice] = msgspec.json.decode(value)["choices"]
            said = choice["delta"]["content"] if "delta" in choice else choice["text"]
            assert (found, sharp.likeness.choice) == (said, choice.get("index", 0))


@given(streams, st.integers(1, 12))
def test_an_answer_is_put_together_the_same(
    stream: list[tuple[Any, str]], num_together: int
) -> None:
    """Whether its chunks come one by one or many in one read."""
    ask = Ask(is_stream=False, num_choices=2)
    heard, heard_blind = Heard(), Heard()
    sharp, blind = Passage(ask, watcher=heard), Passage(ask, watcher=heard_blind)
    blind.likeness = Blind()
    whole, whole_blind = Assembler(), Assembler()
    values = values_of(stream)
    for start in range(0, len(values), num_together):
        together, at = values[start : start + num_together], 0
        while at < len(together):
            if texts := sharp.take_alike(together, at, start):
                alike, num_bytes = sharp.likeness, sum(map(len, together[at : at + len(texts)]))
                whole.add_texts(alike.choice, alike.field, texts, num_bytes)
                at += len(texts)
                continue
            if (passed := sharp.take(together[at], start)) is not None:
                whole.add(passed)
            at += 1
        for value in together:
            if (passed := blind.take(value, start)) is not None:
                whole_blind.add(passed)
        sharp.report()
        blind.report()
        assert sharp.tally == blind.tally
    assert whole.body({}) == whole_blind.body({})
    assert heard.said == heard_blind.said


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
        b'{"content":"a","choices":[{"delta":{"content":"\\u0061"}}]}',
        b'{"choices":[{"delta":{"content":"a","content":"\\u0061"}}]}',
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

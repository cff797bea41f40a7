"""The parser against texts built from known calls, whole and in every split."""

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvota.model.tool_format import ToolFormat, tool_format
from kvota.model.toolcalls import (
    CallArguments,
    CallStarted,
    ContentText,
    ToolCallEvent,
    ToolCallParser,
    call_ids,
)

HERMES, LLAMA3, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
MISTRAL_ARGS = ToolFormat.MISTRAL_ARGS


@dataclass
class Answer:
    """What a client ends up with."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments as text


def new_parser(format: ToolFormat, **options: Any) -> ToolCallParser:
    numbers = count()
    return ToolCallParser(format, lambda: f"id{next(numbers)}", **options)


def events_of(
    parser: ToolCallParser, pieces: Iterable[str], *, at_limit: bool = False
) -> Iterator[ToolCallEvent]:
    for piece in pieces:
        yield from parser.push(piece)
    yield from parser.finish(at_limit=at_limit)


def answer_of(
    format: ToolFormat, pieces: Iterable[str], *, at_limit: bool = False, **options: Any
) -> Answer:
    """Collect the events, checking the order that every client relies on."""
    answer = Answer()
    for event in events_of(new_parser(format, **options), pieces, at_limit=at_limit):
        if isinstance(event, ContentText):
            assert event.text
            answer.content += event.text
        elif isinstance(event, CallStarted):
            assert event.index == len(answer.calls)
            assert event.id == f"id{event.index}"
            answer.calls.append((event.name, ""))
        else:
            assert event.index == len(answer.calls) - 1
            assert event.json_fragment
            name, arguments = answer.calls[-1]
            answer.calls[-1] = name, arguments + event.json_fragment
    return answer


def parse(text: str, format: ToolFormat = HERMES, **options: Any) -> Answer:
    return answer_of(format, [text], **options)


def cut(text: str, points: Iterable[int]) -> list[str]:
    marks = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


def write(format: ToolFormat, calls: Sequence[tuple[str, str]]) -> str:
    key = format.syntax.arguments_key
    objects = [f'{{"name": {json.dumps(name)}, "{key}": {text}}}' for name, text in calls]
    if format is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if format is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if format is MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)
    return "; ".join(objects)


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(alphabet='ab"\\{}[]<>/\n你😀', max_size=8),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    ),
    max_size=3,
).flatmap(lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=1)]))
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), min_size=1, max_size=3)
FORMATS = st.sampled_from(list(ToolFormat))
OBJECT_FORMATS = st.sampled_from([HERMES, LLAMA3, MISTRAL])  # the name is a JSON text
BARE_NAMES = st.text("abcXYZ019_-.", min_size=1, max_size=8)
BARE_CALLS = st.lists(st.tuples(BARE_NAMES, ARGUMENTS), min_size=1, max_size=3)
SPLITS = st.lists(st.integers(0, 10_000), max_size=12)
NOISE = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "</"),
            *("[TOOL_CALLS]f[ARGS]", "[ARGS]", "[CALL_ID]", "[ARGS]{}", "f", "{}"),
            *(
                '{"name": "f", "arguments": {"a": 1}}',
                '{"name": "f"}',
                '{"parameters": {}, "name": ',
            ),
            *('{"arguments": {"x": "', '"}', "{", "}", "[", "]", ",", ";", '"', "\n", " ", "text"),
        ]
    ),
    max_size=14,
).map("".join)


@given(OBJECT_FORMATS, CALLS, SPLITS)
def test_calls_come_back_as_they_were_written(
    format: ToolFormat, calls: list[tuple[str, str]], splits: list[int]
) -> None:
    answer = answer_of(format, cut(write(format, calls), splits))
    assert answer.content == ""
    assert answer.calls == calls


@given(st.sampled_from([HERMES, MISTRAL]), CALLS, SPLITS)
def test_content_around_calls_comes_back(
    format: ToolFormat, calls: list[tuple[str, str]], splits: list[int]
) -> None:
    text = f"Let me see. 2 < 3\n\n{write(format, calls)}\nDone."
    answer = answer_of(format, cut(text, splits))
    assert answer == Answer("Let me see. 2 < 3\nDone.", calls)


@given(BARE_CALLS, SPLITS)
def test_calls_with_bare_names_come_back_and_so_does_content(
    calls: list[tuple[str, str]], splits: list[int]
) -> None:
    text = f"Let me see. 2 < 3 [x]\n{write(MISTRAL_ARGS, calls)}\nDone {{}}."
    answer = answer_of(MISTRAL_ARGS, cut(text, splits))
    assert answer == Answer("Let me see. 2 < 3 [x]\nDone {}.", calls)


@given(FORMATS, NOISE, SPLITS)
@example(HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}<tool_call>', [])
def test_no_split_changes_the_answer(format: ToolFormat, text: str, splits: list[int]) -> None:
    whole = answer_of(format, [text])
    assert answer_of(format, cut(text, splits)) == whole
    assert answer_of(format, text) == whole


@given(FORMATS, NOISE)
def test_a_text_without_a_call_is_given_back_whole(format: ToolFormat, text: str) -> None:
    answer = parse(text, format)
    if not answer.calls:
        assert answer.content == text


@given(st.sampled_from([HERMES, MISTRAL, MISTRAL_ARGS]), st.text())
def test_plain_text_is_content(format: ToolFormat, text: str) -> None:
    assert parse(text, format) == Answer(text)


def test_the_case_of_two_calls_one_empty_one_nested() -> None:
    nested = '{"q": "a \\"}{\\" b", "deep": {"list": [{"x": 1}, {}]}}'
    text = write(HERMES, [("now", "{}"), ("search", nested)])
    for pieces in ([text], list(text), cut(text, range(0, 200, 7))):
        answer = answer_of(HERMES, pieces)
        assert answer == Answer("", [("now", "{}"), ("search", nested)])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in answer.calls)


def test_the_first_event_of_a_call_names_it_and_later_ones_only_carry_arguments() -> None:
    events = list(events_of(new_parser(HERMES), write(HERMES, [("f", '{"a": 1}')])))
    assert events[0] == CallStarted(0, "id0", "f")
    assert all(isinstance(event, CallArguments) for event in events[1:])
    assert len(events) > 3


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = new_parser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {') == []
    assert parser.push('"te') == [CallStarted(0, "id0", "f"), CallArguments(0, '{"te')]
    assert parser.push('xt": "a long story') == [CallArguments(0, 'xt": "a long story')]
    assert parser.push('"}}\n</tool') == [CallArguments(0, '"}')]
    assert parser.push("_call>") == parser.finish() == []


def test_a_marker_is_never_shown_in_part() -> None:
    parser = new_parser(HERMES)
    assert parser.push("a <tool") == [ContentText("a")]
    assert parser.push("_ca") == []
    assert parser.push("ke>") == [ContentText(" <tool_cake>")]


def test_a_marker_may_begin_inside_a_false_one() -> None:
    assert parse('<tool<tool_call>{"name": "f"}</tool_call>') == Answer("<tool", [("f", "{}")])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f"}',
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "{}"}',
        '{"arguments": {}, "name": "f"}',
        '{"type": "function", "id": "x", "name": "f", "arguments": {}}',
    ],
)
def test_a_call_without_arguments_has_empty_ones(body: str) -> None:
    assert parse(f"<tool_call>{body}</tool_call>") == Answer("", [("f", "{}")])


def test_arguments_may_come_before_the_name_or_be_called_parameters() -> None:
    text = '<tool_call>{"parameters": {"a": {"b": "}"}} , "name": "f"}</tool_call>'
    assert parse(text) == Answer("", [("f", '{"a": {"b": "}"}}')])


def test_an_object_written_inside_a_string_is_unwrapped() -> None:
    body = json.dumps({"name": "f", "arguments": '{"a": 1}'})
    assert parse(f"<tool_call>{body}</tool_call>") == Answer("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": {\'a\': 1}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "text"}',
        '{"name": 3, "arguments": {"a": 1}}',
        '{"name": ""}',
        '{"name": null}',
        '{"arguments": {"a": 1}}',
        '{"answer": 42}',
        r'{"name": "\ud800"}',  # half a character, which no answer can carry
        r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}',
        "{}",
        "",
    ],
)
def test_what_is_no_call_becomes_content_whole(body: str) -> None:
    for text in (f"<tool_call>\n{body}\n</tool_call>", f"Hm. <tool_call>{body}"):
        assert parse(text) == Answer(text)


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "f"}</tool_call>'
    assert parse(text) == Answer('<tool_call>{"name":', [("f", "{}")])


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    assert parse('<tool_call>{"name": "f", "arguments": {"a": "b') == Answer(
        "", [("f", '{"a": "b')]
    )


def test_what_follows_a_break_inside_arguments_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>'
    assert parse(text) == Answer("oops}}</tool_call>", [("f", '{"a": 1, ')])


@pytest.mark.parametrize(
    ("text", "cut_call"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "b', 0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>', 0),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"a": ', 1),
        ('<tool_call>{"name": "f", "arguments": {"a": {}} oops', None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', None),
        ('<tool_call>{"name": "f", "argum', None),
        ("words", None),
    ],
)
def test_half_told_arguments_are_remembered(text: str, cut_call: int | None) -> None:
    parser = new_parser(HERMES)
    told = list(events_of(parser, text))
    assert parser.cut_call == cut_call
    if cut_call is not None:
        assert cut_call == max(e.index for e in told if isinstance(e, CallStarted))


class TestWholeCalls:
    @given(FORMATS, BARE_CALLS, SPLITS)
    def test_whole_ones_come_back_each_at_once(
        self, format: ToolFormat, calls: list[tuple[str, str]], splits: list[int]
    ) -> None:
        parser = new_parser(format, whole_calls=True)
        told = list(events_of(parser, cut(write(format, calls), splits)))
        names = [event.name for event in told if isinstance(event, CallStarted)]
        arguments = [event.json_fragment for event in told if isinstance(event, CallArguments)]
        assert list(zip(names, arguments, strict=True)) == calls
        assert len(told) == 2 * len(calls)

    @given(FORMATS, BARE_CALLS, st.integers(0, 10_000))
    def test_no_call_is_told_by_half_wherever_the_text_ends(
        self, format: ToolFormat, calls: list[tuple[str, str]], end: int
    ) -> None:
        text = write(format, calls)
        answer = parse(text[: end % (len(text) + 1)], format, whole_calls=True)
        assert answer.calls == calls[: len(answer.calls)]

    def test_a_cut_one_is_content_whole(self) -> None:
        whole = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        half = '<tool_call>\n{"name": "f", "arguments": {"a": "b'
        assert parse(half, whole_calls=True) == Answer(half)
        assert parse(f"{whole}\n{half}", whole_calls=True) == Answer(f"\n{half}", [("f", "{}")])

    def test_a_broken_one_is_content_whole(self) -> None:
        text = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>'
        assert parse(text, whole_calls=True) == Answer(text)

    def test_one_that_a_limit_cuts_is_told_as_far_as_it_is(self) -> None:
        text = '<tool_call>{"name": "f", "arguments": {"a": "b'
        parser = new_parser(HERMES, whole_calls=True)
        told = list(events_of(parser, [text], at_limit=True))
        assert told == [CallStarted(0, "id0", "f"), CallArguments(0, '{"a": "b')]
        assert parser.cut_call == 0
        unsure = '<tool_call>{"name": "f", "arg'
        assert parse(unsure, whole_calls=True, at_limit=True) == Answer(unsure)


def test_white_space_stays_with_the_content_behind_it() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(f"a \n{call}\n b \n") == Answer("a\n b \n", [("f", "{}")])
    assert parse('a \n<tool_call>{"name": "f"}\tb') == Answer("a\tb", [("f", "{}")])
    assert parse(f" {call} \n {call} ") == Answer("", [("f", "{}")] * 2)


NUM_SPACES = 2_000_000


@pytest.mark.parametrize(
    "begin",
    ["", "<tool_call>", "<tool_call>{", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
)
def test_the_time_for_white_space_grows_with_its_length_only(begin: str) -> None:
    """With its square it would be a minute."""
    begun_s = time.monotonic()
    answer = parse(begin + " " * NUM_SPACES + "x")
    assert time.monotonic() - begun_s < 20
    assert len(answer.content) == NUM_SPACES + 1 + (0 if answer.calls else len(begin))


def test_the_closing_mark_may_be_missing() -> None:
    one = '<tool_call>{"name": "f"}'
    assert parse(one) == Answer("", [("f", "{}")])
    assert parse(one + one) == Answer("", [("f", "{}"), ("f", "{}")])
    assert parse(one + " and so on") == Answer(" and so on", [("f", "{}")])
    assert parse(one + "\n</tool_") == Answer("", [("f", "{}")])


def test_one_tag_may_hold_several_objects() -> None:
    text = '<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call>'
    assert parse(text) == Answer("", [("f", "{}"), ("g", "{}")])


def test_an_answer_of_json_is_a_llama_call_only_with_a_name() -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    expected = [("f", '{"a": 1}')]
    assert parse(call, LLAMA3) == Answer("", expected)
    assert parse(f"\n <|python_tag|>{call}", LLAMA3) == Answer("", expected)
    assert parse(f"{call};\n{call}", LLAMA3) == Answer("", expected * 2)
    for text in ('{"a": 1}', f"The call is {call}", "<|python_tag|>print(1)"):
        assert parse(text, LLAMA3) == Answer(text)


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = new_parser(LLAMA3)
    assert parser.push('{"answer"') == [ContentText('{"answer"')]


def test_mistrals_own_ids_are_passed_over() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g"}]'
    assert parse(text, MISTRAL) == Answer("", [("f", '{"a": 1}'), ("g", "{}")])


def test_mistrals_ids_before_the_arguments_are_passed_over() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}[TOOL_CALLS] g[ARGS] {}'
    assert parse(text, MISTRAL_ARGS) == Answer("", [("f", '{"a": 1}'), ("g", "{}")])


@pytest.mark.parametrize(
    "body",
    ["", "f", "f[ARGS]", "f[ARGS]3", "f[ARGS][1]", "f [ARGS]{}", "[ARGS]{}", "[CALL_ID]a[ARGS]{}",
     '"f"[ARGS]{}', "f[OTHER]{}", "f[CALL_ID]a b[ARGS]{}", "f" * 300 + "[ARGS]{}",
     '[{"name": "f"}]'],
)  # fmt: skip
def test_what_is_no_call_with_a_bare_name_becomes_content_whole(body: str) -> None:
    assert parse(f"[TOOL_CALLS]{body}", MISTRAL_ARGS) == Answer(f"[TOOL_CALLS]{body}")


def test_arguments_behind_a_bare_name_are_passed_on_while_they_are_written() -> None:
    parser = new_parser(MISTRAL_ARGS)
    assert parser.push("[TOOL_CALLS]f[ARGS]{") == []
    assert parser.push('"te') == [CallStarted(0, "id0", "f"), CallArguments(0, '{"te')]
    assert parser.push('xt": {}') == [CallArguments(0, 'xt": {}')]
    assert parser.push("}[TOOL_CALLS]") == [CallArguments(0, "}")]
    assert parser.push("g[ARGS]{}") == [CallStarted(1, "id1", "g"), CallArguments(1, "{}")]
    assert parser.finish() == []


def test_ids_look_like_openais_and_differ() -> None:
    new_id = call_ids(random.Random(7))
    made = [new_id() for _ in range(100)]
    assert len(set(made)) == 100
    assert all(text.startswith("call_") and len(text) == 29 for text in made)
    assert all(text[5:].isalnum() for text in made)


@pytest.mark.parametrize(
    ("source", "format"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("…<tool_call>…", HERMES),
        ("{{ '[TOOL_CALLS] ' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_ARGS),
        ("…<|python_tag|>…", LLAMA3),
        ("""{{ '"parameters": ' }}{{ 'ipython' }}""", LLAMA3),
    ],
)
def test_the_template_shows_the_format(source: str | None, format: ToolFormat) -> None:
    assert tool_format(source) is format


@pytest.mark.parametrize(
    ("format", "markers"),
    [
        (HERMES, ("<tool_call>", "</tool_call>")),
        (LLAMA3, ("<|python_tag|>",)),
        (MISTRAL, ("[TOOL_CALLS]",)),
        (MISTRAL_ARGS, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    ],
)
def test_the_markers_that_must_stay_visible(format: ToolFormat, markers: Any) -> None:
    assert format.visible_markers == markers

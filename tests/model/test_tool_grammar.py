"""Forced calls: what llguidance lets through, and that the parser reads it back."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from kvota.core.errors import InvalidRequest
from kvota.model.tokenizer import Tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from kvota.model.tool_format import ToolFormat
from kvota.model.tool_grammar import blamed, forced_grammar, guided_grammar
from kvota.model.toolcalls import CallStarted, ToolCallParser
from tests.support.tiny_tokenizer import IM_END_ID, tiny_tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("weather2"), tool("free", {"type": "object"})]
BERLIN = ("weather", '{"city": "Ber{lin} \\"x\\"", "days": 3}')
NOTHING = ("weather2", "{}")
FREE = ("free", '{"a": {"b": [1, 2]}}')


def tokenizer(*special: str) -> Tokenizer:
    core = tiny_tokenizer()
    core.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(TokenizerParts(core=core, eos_id=IM_END_ID, eos_ids=frozenset({IM_END_ID})))


PLAIN = tokenizer()


def write(format: ToolFormat, *calls: tuple[str, str]) -> str:
    key = format.syntax.arguments_key
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if format is ToolFormat.HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if format is ToolFormat.MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if format is ToolFormat.MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    return "; ".join(objects)


def allows(grammar: str, text: str, own: Tokenizer = PLAIN) -> bool:
    """Whether every token of the text may follow, and the text may end there."""
    matcher = LLMatcher(LLTokenizer(own.to_json(), eos_token=[IM_END_ID]), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = own.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("format", ToolFormat)
def test_calls_that_match_their_schema_are_allowed_and_others_are_not(format: ToolFormat) -> None:
    grammar = forced_grammar(format, TOOLS, None)
    assert LLMatcher.validate_grammar(grammar) == ""
    for call in (BERLIN, NOTHING, FREE):
        assert allows(grammar, write(format, call)), call
    for call in (
        ("weather", "{}"),
        ("weather", '{"city": 3}'),
        ("weather", '{"city": "x", "days": 0}'),
        ("weather", '{"city": "x", "more": 1}'),
        ("weather2", '{"a": 1}'),
        ("unknown", "{}"),
    ):
        assert not allows(grammar, write(format, call)), call


@pytest.mark.parametrize("format", ToolFormat)
def test_an_answer_in_words_is_not_allowed(format: ToolFormat) -> None:
    grammar = forced_grammar(format, TOOLS, None)
    assert not allows(grammar, "hello")
    assert not allows(grammar, write(format, NOTHING) + " hello")
    assert not allows(grammar, "")


@pytest.mark.parametrize("format", ToolFormat)
def test_more_calls_may_follow_unless_that_is_off(format: ToolFormat) -> None:
    several = write(format, BERLIN, NOTHING, FREE)
    assert allows(forced_grammar(format, TOOLS, None), several)
    assert not allows(forced_grammar(format, TOOLS, None, parallel=False), several)
    assert allows(forced_grammar(format, TOOLS, None, parallel=False), write(format, FREE))


@pytest.mark.parametrize("format", ToolFormat)
def test_a_named_function_is_the_only_one(format: ToolFormat) -> None:
    grammar = forced_grammar(format, TOOLS, "weather2")
    assert allows(grammar, write(format, NOTHING))
    assert not allows(grammar, write(format, BERLIN))


@pytest.mark.parametrize("format", ToolFormat)
def test_what_the_grammar_allows_the_parser_reads(format: ToolFormat) -> None:
    parser = ToolCallParser(format, lambda: "id")
    events = parser.push(write(format, BERLIN, NOTHING)) + parser.finish()
    assert [event.name for event in events if isinstance(event, CallStarted)] == [
        "weather",
        "weather2",
    ]
    assert len(events) == 4


@pytest.mark.parametrize("format", [ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS])
def test_markers_that_are_special_tokens_are_reached_by_id(format: ToolFormat) -> None:
    own = tokenizer(*format.visible_markers)
    text = write(format, BERLIN)
    ids = own.special_markers(format.visible_markers)
    assert len(ids) == len(format.visible_markers)
    assert allows(forced_grammar(format, TOOLS, None, marker_ids=ids), text, own)
    assert not allows(forced_grammar(format, TOOLS, None), text, own)


STRICT = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    tool("free", WEATHER),
]
MARKED = [format for format in ToolFormat if not format.syntax.may_start_bare]
WORDS = ["", "a < b [x]\n", "<tool_call", "[TOOL_CALLS", "{}"]


@pytest.mark.parametrize("marks", ["written out", "as tokens"])
@pytest.mark.parametrize("format", MARKED)
class TestGuided:
    def grammar(self, format: ToolFormat, marks: str, **options: Any) -> tuple[str, Tokenizer]:
        own = PLAIN if marks == "written out" else tokenizer(*format.visible_markers)
        ids = own.special_markers(format.visible_markers)
        grammar = guided_grammar(format, STRICT, marker_ids=ids, **options)
        assert grammar is not None
        return grammar, own

    def test_words_and_calls_may_take_turns(self, format: ToolFormat, marks: str) -> None:
        grammar, own = self.grammar(format, marks)
        call = write(format, BERLIN)
        for words in WORDS:
            assert allows(grammar, words, own)
            assert allows(grammar, words + call, own)
            assert allows(grammar, f"{call}\n{words}{call}\nand {words}", own)

    def test_arguments_are_those_of_a_strict_tool(self, format: ToolFormat, marks: str) -> None:
        grammar, own = self.grammar(format, marks)
        for arguments in ("{}", '{"city": 3}', '{"city": "x", "more": 1}'):
            assert not allows(grammar, "So: " + write(format, ("weather", arguments)), own)
            assert allows(grammar, "So: " + write(format, ("free", arguments)), own)
        assert not allows(grammar, write(format, ("unknown", "{}")), own)

    def test_one_call_ends_the_answer_where_one_is_all(
        self, format: ToolFormat, marks: str
    ) -> None:
        grammar, own = self.grammar(format, marks, parallel=False)
        call = write(format, BERLIN)
        assert allows(grammar, "So: ", own)
        assert allows(grammar, f"So: {call}", own)
        assert not allows(grammar, f"{call}\n{call}", own)


def test_where_no_mark_shows_a_call_nothing_is_guided() -> None:
    assert guided_grammar(ToolFormat.LLAMA3_JSON, STRICT) is None


def test_who_is_to_blame_is_found_by_the_line() -> None:
    lark = forced_grammar(ToolFormat.HERMES, TOOLS, None)
    line = next(n for n, text in enumerate(lark.split("\n"), 1) if text.startswith("arguments_2"))
    error = InvalidRequest(f"at {line}(14): failed to compile JSON schema: why", param="tools")
    told = blamed(error, lark, TOOLS)
    assert (told.message, told.param) == (
        "The parameters of 'free' cannot be enforced: why",
        "tools",
    )
    for other in (
        InvalidRequest("at 1(2): why", param="tools"),
        InvalidRequest("why", param="tools"),
        InvalidRequest(f"at {line}(14): why", param="response_format"),
    ):
        assert blamed(other, lark, TOOLS) is other


def test_a_call_id_may_stand_before_the_arguments_where_the_format_has_one() -> None:
    grammar = forced_grammar(ToolFormat.MISTRAL_ARGS, TOOLS, None)
    assert allows(grammar, "[TOOL_CALLS]weather2[CALL_ID]abcDEF123[ARGS]{}")
    assert not allows(grammar, "[TOOL_CALLS]weather2[CALL_ID]abc[ARGS]{}")


def test_a_name_that_no_tool_has_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'nope'") as caught:
        forced_grammar(ToolFormat.HERMES, TOOLS, "nope")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": ["object"]}, [1], {"x-guidance": {}}],
)
def test_parameters_that_cannot_be_enforced_are_refused(parameters: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        forced_grammar(ToolFormat.HERMES, [tool("f", parameters)], None)
    assert caught.value.param == "tools"


def test_a_schema_without_a_type_is_one_of_objects() -> None:
    grammar = forced_grammar(
        ToolFormat.HERMES, [tool("f", {"properties": {"a": {"const": 1}}})], None
    )
    assert allows(grammar, write(ToolFormat.HERMES, ("f", json.dumps({"a": 1}))))
    assert not allows(grammar, write(ToolFormat.HERMES, ("f", "3")))

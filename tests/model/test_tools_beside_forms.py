"""A form or tool calls, as the model likes: every answer is one of them, whole, for every format.

The oracle is a model of pure noise. What it writes under the grammar goes through the parser, and
must come out as calls with arguments that are valid for their tools, or as a valid document.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from kvota.core.errors import InvalidRequest
from kvota.model.grammar import ConstraintFactory, GrammarCompiler
from kvota.model.tokenizer import Tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from kvota.model.tool_format import ToolFormat
from kvota.model.tool_grammar import CallGrammar, call_grammar
from kvota.model.toolcalls import CallArguments, CallStarted, ContentText, ToolCallParser
from tests.support.grammar_walk import allowed_tokens, is_allowed_whole
from tests.support.tiny_tokenizer import IM_END_ID, tiny_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", 'B"x']}},
}
ANSWER = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/name"}, "next": {"$ref": "#"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Bob", "weather", "weatherman"]}},
}


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", CITY), tool("ping", None)]
SCHEMAS: dict[str, Any] = {"weather": CITY, "ping": {"type": "object", "maxProperties": 0}}
FORMATS = list(ToolFormat)
MARKED = [format for format in FORMATS if not format.syntax.may_start_bare]


def tokenizer(*special: str) -> Tokenizer:
    core = tiny_tokenizer()
    core.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(TokenizerParts(core=core, eos_id=IM_END_ID, eos_ids=frozenset({IM_END_ID})))


PLAIN = tokenizer()
PLAIN_COMPILER = GrammarCompiler(PLAIN.to_json(), 320, [IM_END_ID])


def calls_of(format: ToolFormat, own: Tokenizer = PLAIN, **options: Any) -> CallGrammar:
    ids = own.special_markers(format.visible_markers)
    return call_grammar(format, TOOLS, marker_ids=ids, **options)


def accepts(factory: ConstraintFactory, text: str) -> bool:
    return is_allowed_whole(factory(), text, PLAIN.pieces, IM_END_ID)


def noise(factory: ConstraintFactory, own: Tokenizer, seed: int) -> str | None:
    """What a model that is fond of endings writes; None when it comes to none."""
    rng, constraint, ids = np.random.default_rng(seed), factory(), []
    likings = np.zeros(320)
    likings[[IM_END_ID, *(token for mark in '"}]' for token in own.encode(mark))]] = 3.0
    for _ in range(300):
        tokens = np.array(allowed_tokens(constraint, 320))
        token = int(tokens[np.argmax(rng.gumbel(size=len(tokens)) + likings[tokens])])
        if token == IM_END_ID:
            break
        constraint.accept(token)
        ids.append(token)
        if constraint.is_complete():
            break
    else:
        return None
    return own.decode(ids, skip_special_tokens=False)


def parsed(format: ToolFormat, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(format, lambda: "id", only=("weather", "ping"), **options)
    content, calls = "", list[tuple[str, str]]()
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case ContentText(piece):
                content += piece
            case CallStarted(name=name):
                calls.append((name, ""))
            case CallArguments(json_fragment=piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return content, calls


@pytest.mark.parametrize("marks", ["written out", "as tokens"])
@pytest.mark.parametrize("format", FORMATS)
def test_noise_writes_calls_or_the_form_and_nothing_else(format: ToolFormat, marks: str) -> None:
    own = PLAIN if marks == "written out" else tokenizer(*format.visible_markers)
    compiler = GrammarCompiler(own.to_json(), 320, [IM_END_ID])
    factory = compiler.json_schema(ANSWER, calls=calls_of(format, own))
    num_calls = num_documents = 0
    for seed in range(60):
        text = noise(factory, own, seed)
        if text is None:
            continue
        content, calls = parsed(format, text)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if not calls:
            jsonschema.validate(json.loads(content), ANSWER)
        assert not (calls and content), text
        num_calls += bool(calls)
        num_documents += not calls
    assert num_calls > 5
    assert num_documents > 5


def write(format: ToolFormat, name: str, arguments: str) -> str:
    head = f'{{"name": "{name}", "{format.syntax.arguments_key}": {arguments}}}'
    match format:
        case ToolFormat.HERMES:
            return f"<tool_call>\n{head}\n</tool_call>"
        case ToolFormat.MISTRAL:
            return f"[TOOL_CALLS] [{head}]"
        case ToolFormat.MISTRAL_ARGS:
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        case ToolFormat.LLAMA3_JSON:
            return head


@pytest.mark.parametrize("format", FORMATS)
def test_each_is_written_as_it_would_be_alone(format: ToolFormat) -> None:
    factory = PLAIN_COMPILER.json_schema(ANSWER, calls=calls_of(format))
    for document in ('{"name": "Bob"}', '{"name":"weather","next":{"name":"Bob"}}'):
        assert accepts(factory, document)
        assert parsed(format, document) == (document, [])
    for arguments in ('{"city": "Rome"}', '{"city": "Rome", "days": 3}'):
        text = write(format, "weather", arguments)
        assert accepts(factory, text)
        assert parsed(format, text) == ("", [("weather", arguments)])
    for text in (
        "Rome",
        '{"name": "Rome"}',
        '{"name": "Bob"}\n' + write(format, "ping", "{}"),
        write(format, "ping", "{}") + '\n{"name": "Bob"}',
        write(format, "weather", '{"city": "Bob"}'),
        write(format, "other", "{}"),
    ):
        assert not accepts(factory, text), text


@pytest.mark.parametrize("format", MARKED)
@pytest.mark.parametrize(
    ("compiled", "text"),
    [
        (lambda calls: PLAIN_COMPILER.choice(["yes", "no"], calls=calls), "no"),
        (lambda calls: PLAIN_COMPILER.regex("[0-9]{3}", calls=calls), "123"),
        (lambda calls: PLAIN_COMPILER.grammar('start: x\nx: "a" x?', calls=calls), "aaa"),
        (lambda calls: PLAIN_COMPILER.grammar('root ::= "b"+', calls=calls), "bb"),
        (lambda calls: PLAIN_COMPILER.json_object(calls=calls), '{"any": [1]}'),
    ],
    ids=["choice", "regex", "lark", "gbnf", "json_object"],
)
def test_every_form_can_stand_beside_marked_calls(
    format: ToolFormat, compiled: Any, text: str
) -> None:
    factory = compiled(calls_of(format))
    assert accepts(factory, text)
    assert accepts(factory, write(format, "ping", "{}"))
    assert not accepts(factory, "nonsense")


def test_beside_bare_calls_only_json_can_be_told_apart() -> None:
    calls = calls_of(ToolFormat.LLAMA3_JSON)
    with pytest.raises(InvalidRequest, match="bare JSON") as refused:
        PLAIN_COMPILER.choice(["yes"], calls=calls, param="structured_outputs.choice")
    assert refused.value.param == "structured_outputs.choice"
    assert accepts(PLAIN_COMPILER.json_object(calls=calls), '{"name": "Bob"}')


def test_the_form_and_the_calls_are_each_blamed_for_their_own_faults() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "nope"}}}
    with pytest.raises(InvalidRequest) as refused:
        PLAIN_COMPILER.json_schema(bad, calls=calls_of(ToolFormat.HERMES), param="response_format")
    assert refused.value.param == "response_format"
    calls = call_grammar(ToolFormat.HERMES, [tool("f", bad)])
    with pytest.raises(InvalidRequest) as refused:
        PLAIN_COMPILER.json_schema(ANSWER, calls=calls, param="response_format")
    assert refused.value.param == "tools"


@pytest.mark.parametrize("format", FORMATS)
def test_tools_beside_a_form_are_bounded_like_tools_alone(format: ToolFormat) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 70_000]}}}
    calls = call_grammar(format, [tool("f", large), tool("g", large)])
    with pytest.raises(InvalidRequest, match="at most 131072") as refused:
        PLAIN_COMPILER.json_object(calls=calls)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("format", FORMATS)
def test_strict_tools_alone_can_have_their_schemas_enforced(format: ToolFormat) -> None:
    tools: Sequence[Mapping[str, Any]] = [tool("weather", CITY, strict=True), tool("ping", CITY)]
    calls = call_grammar(format, tools, strict_only=True)
    factory = PLAIN_COMPILER.json_schema(ANSWER, calls=calls)
    assert accepts(factory, write(format, "ping", '{"free": [1]}'))
    assert not accepts(factory, write(format, "weather", '{"free": [1]}'))
    assert accepts(factory, write(format, "weather", '{"city": "Rome"}'))


class TestReading:
    CALL = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'

    def test_marks_inside_of_an_answer_are_its_text(self) -> None:
        for text in (f"yes {self.CALL}", f'{{"a": "{self.CALL}"}}', "{}" + self.CALL):
            assert parsed(ToolFormat.HERMES, text) == (text, [])
        quoted = '{"a": "[TOOL_CALLS]ping[ARGS]{}"}'
        assert parsed(ToolFormat.MISTRAL_ARGS, quoted) == (quoted, [])

    def test_a_name_that_no_tool_has_makes_no_call(self) -> None:
        text = '{"name": "Bob", "parameters": {"a": 1}}'
        assert parsed(ToolFormat.LLAMA3_JSON, text) == (text, [])
        text = text.replace("Bob", "ping")
        assert parsed(ToolFormat.LLAMA3_JSON, text) == ("", [("ping", '{"a": 1}')])

    def test_nor_does_a_name_without_arguments(self) -> None:
        text = '{"name": "ping"}'
        assert parsed(ToolFormat.LLAMA3_JSON, text) == (text, [])

"""Structured output: what may follow, as a set of tokens, computed by llguidance.

    schema | regex | choice | grammar ─▶ compiled once, in bounded time ─▶ template
                                             template.deep_copy() per choice ─▶ Constraint

Everything a client can send is bounded before or by llguidance, so that a hostile grammar costs
at most about a second of one thread and ends in InvalidRequest:

- size and nesting are checked here; fuel and automaton sizes by `LLParserLimits`;
- compilation recurses along chains of rules and `$ref`s, which a client controls, so it runs on a
  thread whose stack is larger than the longest chain that fits the size limit needs;
- the first mask is computed here too, so most grammars that are too complex are refused at once;
- masks are made within the step, for which everybody in it waits, so all choices of a request
  together have so much time for them, and a little more with each token (`MaskTime`).

JSON is written with at most one run of white space between tokens: nothing, one space, or one new
line with up to 40 spaces of indentation, and none before or after the document. A model cannot
fill its output with blanks, and may still write compact or indented text as it was taught.

Where only one text can follow, llguidance allows the token with which the tokenizer itself would
go on, not every token that fits: a model is asked for nothing that it never saw in training.

A text that `max_tokens` cuts is not a sentence of the grammar; it ends with `length`.

Where tools may be called, each of these forms can leave the model the choice between an answer in
that form and `calls`, a grammar of `tool_grammar.py`: the whole answer is one or the other.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvota.core.errors import InvalidRequest, UnsupportedModel
from kvota.core.request import Constraint
from kvota.model.grammar_tokens import NAME_MARK, hide_specials, name_specials
from kvota.model.json_schema import safe_schema
from kvota.model.schema_choice import any_schema
from kvota.model.tool_grammar import CallGrammar

ConstraintFactory = Callable[[], Constraint]

RESPONSE_FORMAT = "response_format"
STRUCTURED_OUTPUTS = "structured_outputs"
TOOLS = "tools"

OPTIONS_KEY = "x-guidance"  # llguidance's own
CALLS_RULE = "calls"
FORM_RULE = "form"

GRAMMAR_BYTES_MAX = 64 * 1024
REGEX_BYTES_MAX = 32 * 1024
CHOICES_BYTES_MAX = 64 * 1024
CALLS_BYTES_MAX = 128 * 1024  # of a grammar of tool calls, schemas included
RULES_MAX = 500  # the GBNF converter's time grows with their square
MESSAGE_CHARS_MAX = 400
# llguidance speaks to whoever embeds it; these say the same to whoever wrote the grammar.
PLAIN_WORDS = {
    "NoExtensionBias": "no text can match it.",
    "Parser Error: Current row has": (
        "too many alternatives are open at once, such as over 500 optional properties of one "
        "object. Simplify it."
    ),
    "parser error: Too many items": "it is too ambiguous. Simplify it.",
    "oneOf constraints are not supported": (
        "branches of `oneOf` may overlap. Use `anyOf`, or give every branch a type of its own or "
        "a required property whose `const` or `enum` strings no other branch has."
    ),
}
# 8 MB hold a chain of about 1,000 rules; 128 KiB of schema or 64 KiB of grammar about 6,500.
COMPILE_STACK_BYTES = 256 * 1024 * 1024
INITIAL_FUEL = 250_000  # a quarter of the default: some 0.3 s of automaton building
LEXER_STATES_MAX = 50_000  # of 1 to 2 kB each
# A fifth of the default. Masks are made within the step, so all who run wait for them: of an
# ambiguous grammar 50,000 items took seconds, these under 0.2 s, and no schema needed more.
STEP_ITEMS_MAX = 10_000
# Of one request, in seconds of CPU. Schemas of 60 properties take 0.05 ms a token, patterns 0.3.
MASK_S_AT_FIRST = 0.5
MASK_S_PER_TOKEN = 0.002
TOO_SLOW = (
    f"finding what may follow takes over {1000 * MASK_S_PER_TOKEN:g} ms a token of all choices. "
    "Simplify it, or ask for fewer choices at once."
)
JSON_WHITESPACE = r"\x20|\x20?\n\x20{0,40}"


class GrammarCompiler:
    """Compiles what clients ask for into factories of constraints over one tokenizer.

    Every method validates and compiles at once, on the caller's time (milliseconds; GIL released),
    and raises InvalidRequest with `param` for what cannot be enforced. The factory it returns gives
    one fresh Constraint per call, in microseconds.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`vocab_size` is the width of the logits: at least the tokenizer's number of tokens.

        `eos_ids`, at least one, are allowed wherever the text so far is complete. `cpu_time` tells
        the seconds that the calling thread has computed, a neighbour's on the core not counted.
        Raises UnsupportedModel for a tokenizer that llguidance cannot follow.
        """
        try:
            text, self._special_ids = hide_specials(tokenizer_json)
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=[*eos_ids])
        except ValueError as error:
            raise UnsupportedModel(
                f"The tokenizer cannot be followed by grammars: {_sentence(str(error))}"
            ) from error
        self._num_words = (vocab_size + 31) // 32
        self._limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            max_lexer_states=LEXER_STATES_MAX,
            step_max_items=STEP_ITEMS_MAX,
            verbose_errors=False,  # verbose ones quote the parser's state
        )
        self._stack_size = threading.Lock()
        self._cpu_time = cpu_time

    def json_object(
        self, *, param: str = RESPONSE_FORMAT, calls: CallGrammar | None = None
    ) -> ConstraintFactory:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, param=param, calls=calls)

    def json_schema(
        self,
        schema: dict[str, Any] | bool,
        *,
        param: str = RESPONSE_FORMAT,
        calls: CallGrammar | None = None,
    ) -> ConstraintFactory:
        """JSON that is valid under `schema`, its properties in the order of the schema.

        Keywords that cannot be enforced are refused by name; unknown ones are annotations, as the
        specification says.
        """
        text = safe_schema(schema, param=param)
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                text,
                overrides={
                    "whitespace_pattern": JSON_WHITESPACE,
                    "lenient": False,  # a keyword that is not enforced is refused
                    "coerce_one_of": False,
                },
            )
        except ValueError as error:
            raise _refused("JSON schema", str(error), param) from error
        return self._form("JSON schema", grammar, param, calls)

    def regex(
        self, pattern: str, *, param: str = STRUCTURED_OUTPUTS, calls: CallGrammar | None = None
    ) -> ConstraintFactory:
        """Text that `pattern` (Rust's regex syntax, no look-around) matches as a whole."""
        _check_text("regex", pattern, REGEX_BYTES_MAX, param)
        return self._form("regex", LLMatcher.grammar_from_regex(pattern), param, calls)

    def choice(
        self,
        choices: Sequence[str],
        *,
        param: str = STRUCTURED_OUTPUTS,
        calls: CallGrammar | None = None,
    ) -> ConstraintFactory:
        """Exactly one of `choices`."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise InvalidRequest("choice must be a list of non-empty strings.", param=param)
        _check_text("choice", "".join(choices), CHOICES_BYTES_MAX, param)
        pattern = "|".join(map(_literal, choices))
        return self._form("choice", LLMatcher.grammar_from_regex(pattern), param, calls)

    def grammar(
        self, text: str, *, param: str = STRUCTURED_OUTPUTS, calls: CallGrammar | None = None
    ) -> ConstraintFactory:
        """Text of a context-free grammar: GBNF (`root ::= …`) or Lark (`start: …`).

        Lark in llguidance's dialect, without `%json`: a schema goes through `json_schema`, where
        it is bounded.
        """
        _check_text("grammar", text, GRAMMAR_BYTES_MAX, param)
        if "%json" in text:
            raise InvalidRequest(
                "%json is not accepted inside a grammar; use a JSON schema instead.", param=param
            )
        lark = _lark_from_gbnf(text, param) if "::=" in text and not _is_lark(text) else text
        lark = name_specials(lark, self._special_ids)
        return self._form("grammar", _grammar_list({"lark_grammar": lark}), param, calls)

    def tool_calls(self, lark: str, *, param: str) -> ConstraintFactory:
        """A grammar of `tool_grammar.py`, whose schemas are bounded already."""
        _check_text("tools", lark, CALLS_BYTES_MAX, param)
        return self._compile("tools", LLMatcher.grammar_from_lark(lark), param)

    def _form(
        self, kind: str, grammar: str, param: str, calls: CallGrammar | None
    ) -> ConstraintFactory:
        """The form by itself, or beside `calls`. Each is blamed for its own faults."""
        if calls is None:
            return self._compile(kind, grammar, param)
        _check_text("tools", calls.lark, CALLS_BYTES_MAX, TOOLS)
        try:
            return self._compile(f"{kind} beside tools", _beside(calls, grammar, param), param)
        except InvalidRequest:
            self._compile(kind, grammar, param)
            self.tool_calls(calls.lark, param=TOOLS)
            raise

    def _compile(self, kind: str, grammar: str, param: str) -> ConstraintFactory:
        with ThreadPoolExecutor(max_workers=1) as pool:
            with self._stack_size:  # the size is a setting of the process, for threads to come
                previous = threading.stack_size(COMPILE_STACK_BYTES)
                try:
                    compiled = pool.submit(self._template, grammar)
                finally:
                    threading.stack_size(previous)
            template = compiled.result()
        if template.is_error():
            raise _refused(kind, template.get_error(), param)
        mask_time = MaskTime(self._cpu_time)
        return lambda: GrammarConstraint(template.deep_copy(), param, mask_time)

    def _template(self, grammar: str) -> LLMatcher:
        """A matcher at its start. A failure to build it, or its first mask, stays in it."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            _write_mask(matcher, np.zeros(self._num_words, np.int32))
        return matcher


class MaskTime:
    """What all choices of one request may still take for their masks, in seconds of CPU."""

    def __init__(self, cpu_time: Callable[[], float]) -> None:
        self._cpu_time = cpu_time
        self._left_s = MASK_S_AT_FIRST

    @property
    def is_over(self) -> bool:
        return self._left_s < 0

    def earn(self) -> None:
        """For a token that was drawn. What was not needed is kept up to what there was at first."""
        self._left_s = min(MASK_S_AT_FIRST, self._left_s + MASK_S_PER_TOKEN)

    @contextmanager
    def counted(self) -> Iterator[None]:
        begun_s = self._cpu_time()
        yield
        self._left_s -= self._cpu_time() - begun_s


class GrammarConstraint:
    """One sequence's place in its grammar (a `core.request.Constraint`).

    A matcher that breaks (a step over its fuel, a token it did not allow) stays broken: the next
    `write_mask` raises, so that exactly the draw which needed it fails.
    """

    def __init__(self, matcher: LLMatcher, param: str, mask_time: MaskTime) -> None:
        self._matcher = matcher
        self._param = param
        self._mask_time = mask_time

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Set bit t % 32 of word t // 32 for every token t that may follow, clear the others.

        `row` has ceil(vocab_size / 32) words and is contiguous. Where the text may end, that
        includes the end-of-text tokens. Raises GrammarBroken.
        """
        if not self._matcher.is_error():
            if self._mask_time.is_over:
                raise self._broken(TOO_SLOW)
            with self._mask_time.counted():
                _write_mask(self._matcher, row)
        if self._matcher.is_error():
            raise self._broken(_sentence(self._matcher.get_error()))

    def accept(self, token: int) -> None:
        """Advance by `token`. Never raises."""
        self._mask_time.earn()
        self._matcher.consume_token(token)

    def is_complete(self) -> bool:
        """True when the text is a sentence and only its end may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _broken(self, reason: str) -> "GrammarBroken":
        return GrammarBroken(
            f"What the output must follow cannot be enforced any further: {reason}",
            param=self._param,
        )


class GrammarBroken(InvalidRequest):
    """A constraint became too complex on the way; the message holds llguidance's reason."""


def _write_mask(matcher: LLMatcher, row: npt.NDArray[np.int32]) -> None:
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _grammar_list(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _beside(calls: CallGrammar, form: str, param: str) -> str:
    """Either a call or calls, or what `form`, a list of one grammar, allows.

    Both stay whole, with names and options of their own. Raises InvalidRequest where they cannot
    be told apart.
    """
    [inner] = json.loads(form)["grammars"]
    if not calls.bare:
        start = {"lark_grammar": f"start: @{CALLS_RULE} | @{FORM_RULE}"}
        named = {"name": CALLS_RULE, "lark_grammar": calls.lark}
        return _grammar_list(start, named, {**inner, "name": FORM_RULE})
    schema = inner.get("json_schema")
    if schema is None:
        raise InvalidRequest(
            f"`{param}` together with `tools` is not supported for this model: its calls are bare "
            "JSON, which may stand beside a JSON schema or object only. Ask for one of these, or "
            'set `tool_choice` to "none".',
            param=param,
        )
    options = schema.pop(OPTIONS_KEY)
    return _grammar_list(
        {"json_schema": {**any_schema([schema, *calls.bare]), OPTIONS_KEY: options}}
    )


def _check_text(kind: str, text: str, bytes_max: int, param: str) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{kind} must be a non-empty string.", param=param)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{kind} contains half of a surrogate pair.", param=param) from error
    if size > bytes_max:
        raise InvalidRequest(
            f"{kind} is {size} bytes long; at most {bytes_max} are compiled.", param=param
        )


def _literal(text: str) -> str:
    """A regex that matches `text` itself."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"
        for letter in text
    )


def _is_lark(text: str) -> bool:
    return re.search(r"(?m)^[^\S\n]*+(%llguidance\b|start\s*+:(?!:=))", text) is not None


def _lark_from_gbnf(text: str, param: str) -> str:
    if text.count("::=") > RULES_MAX:
        raise InvalidRequest(f"A GBNF grammar may have at most {RULES_MAX} rules.", param=param)
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter raises bare Exception, and RecursionError
        raise _refused("GBNF grammar", str(error), param) from error


def _refused(kind: str, reason: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"The {kind} cannot be enforced: {_sentence(reason)}", param=param)


def _sentence(message: str) -> str:
    """What llguidance said, without its state and its excerpt of the grammar."""
    message = message.replace(NAME_MARK, "")
    for beginning, plain in PLAIN_WORDS.items():
        if message.startswith(beginning):
            return plain
    if keywords := re.match(r"Unimplemented keys: \[(.*)\]", message):
        return f"the schema uses {keywords[1]}, which is not supported. Leave it out."
    message = re.split(r"<non-verbose/>|<backtrace>|<state>|\n\s*\d+ \|", message)[0]
    message = " ".join(message.split())
    return message if len(message) <= MESSAGE_CHARS_MAX else message[:MESSAGE_CHARS_MAX] + "…"

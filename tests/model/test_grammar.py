"""Grammars: what they allow, that a model of pure noise obeys them, and what is refused."""

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvota.core.errors import InvalidRequest, UnsupportedModel
from kvota.core.plan import Draw
from kvota.core.request import Constraint, SamplingParams
from kvota.model.grammar import (
    MASK_S_AT_FIRST,
    MASK_S_PER_TOKEN,
    STRUCTURED_OUTPUTS,
    ConstraintFactory,
    GrammarBroken,
    GrammarCompiler,
)
from kvota.model.sampler import Sampler
from tests.support.random_schemas import random_schema
from tests.support.tiny_tokenizer import (
    ENDOFTEXT_ID,
    FIRST_BYTE_ID,
    IM_END_ID,
    VOCAB_SIZE,
    byte_ids,
    tiny_tokenizer,
    token_bytes,
)

WIDTH = VOCAB_SIZE + 5  # a padded head, and not a multiple of 32
EOS = {ENDOFTEXT_ID, IM_END_ID}
TEXT_OF = token_bytes()
SECONDS_MAX = 10  # all take under half a second; what grows with the square of a text, more


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_str(), WIDTH, sorted(EOS))


def allowed(constraint: Constraint) -> set[int]:
    row = np.full((WIDTH + 31) // 32, -1, np.int32)
    constraint.write_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any(), "a padding row of the head is allowed"
    return set(np.flatnonzero(bits).tolist())


def accepts(factory: ConstraintFactory, text: str) -> bool:
    """Whether `text` is a whole sentence, written with the longest tokens that are allowed."""
    constraint, rest = factory(), text.encode()
    while rest:
        fitting = [t for t in allowed(constraint) - EOS if rest.startswith(TEXT_OF[t])]
        if not fitting:
            return False
        token = max(fitting, key=lambda t: len(TEXT_OF[t]))
        constraint.accept(token)
        rest = rest.removeprefix(TEXT_OF[token])
    return bool(allowed(constraint) & EOS)


def write(factory: ConstraintFactory, *, seed: int, tokens_max: int = 200) -> tuple[bytes, bool]:
    """The text of a model of pure noise that is fond of endings, and whether it ended by itself."""
    rng = np.random.default_rng(seed)
    fondness = np.zeros(WIDTH, np.float32)
    fondness[[*EOS, *byte_ids('"}]')]] = 4.0
    params = SamplingParams(temperature=1.0 + seed % 5 / 4, seed=seed)
    sampler, constraint, tokens = Sampler(WIDTH), factory(), [ENDOFTEXT_ID]
    while len(tokens) <= tokens_max and not constraint.is_complete():
        logits = (rng.standard_normal(WIDTH) * 2 + fondness).astype(np.float32)
        [sampled] = sampler.sample(logits[None], [Draw(params, 0, tokens, 1, constraint)])
        assert sampled.error is None, sampled.error
        constraint.accept(sampled.token)
        tokens.append(sampled.token)
        if sampled.token in EOS:
            break
    text = b"".join(TEXT_OF[token] for token in tokens)
    return text, constraint.is_complete()


def test_noise_writes_valid_json_for_every_schema(compiler: GrammarCompiler) -> None:
    num_ended = 0
    for seed in range(300):
        schema = random_schema(seed)
        text, ended = write(compiler.json_schema(schema), seed=seed)
        if ended:
            num_ended += 1
            context = f"seed {seed}: {json.dumps(schema)} -> {text!r}"
            try:
                jsonschema.validate(json.loads(text.decode()), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(context) from error
    assert num_ended > 200  # otherwise the test says little


def test_noise_writes_json_objects(compiler: GrammarCompiler) -> None:
    texts = [write(compiler.json_object(), seed=seed) for seed in range(40)]
    ended = [json.loads(text.decode()) for text, ended in texts if ended]
    assert len(ended) > 20
    assert all(isinstance(value, dict) for value in ended)


# Pieces that the tokenizer merges, alone and next to what they are made of.
pieces = st.sampled_from(["the", " the", "t", "true", '{"', "{", '"', "é", "好", "12", "1", "|"])
choice_texts = st.lists(pieces, min_size=1, max_size=4).map("".join)


@given(
    st.lists(choice_texts | st.text(min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 12),
)
def test_choice_allows_the_tokens_that_lead_to_a_choice(
    compiler: GrammarCompiler, choices: list[str], which: int, length: int
) -> None:
    spelled = [choice.encode() for choice in choices]
    so_far = spelled[which % len(spelled)][:length]
    constraint = compiler.choice(choices)()
    for byte in so_far:
        constraint.accept(FIRST_BYTE_ID + byte)
    leading = {
        token
        for token, text in enumerate(TEXT_OF)
        if text and any(choice.startswith(so_far + text) for choice in spelled)
    }
    ends = EOS if so_far in spelled else set()
    is_forced = not ends and len({TEXT_OF[token][0] for token in leading}) == 1
    if is_forced:
        assert allowed(constraint)
        assert allowed(constraint) <= leading
    else:
        assert allowed(constraint) == leading | ends
    assert constraint.is_complete() == (bool(ends) and not leading)


@pytest.mark.parametrize(
    "text", ["\x00\x7f", "<|im_end|>", "a|b", "\\d+", "/", "好é", '"', "\u2028", "%json", "(?i)x"]
)
def test_a_choice_is_taken_literally(compiler: GrammarCompiler, text: str) -> None:
    factory = compiler.choice([text, "other"])
    assert accepts(factory, text)
    assert not accepts(factory, text[:-1])


@pytest.mark.parametrize("pattern", ["[a-c]{1,3}x?", "(ab|a)*", "é+|[^a]", "a.c", "\\d{2}", "^x$"])
@given(text=st.text("abcxé1\n", max_size=5))
def test_regex_agrees_with_python_on_whole_texts(
    compiler: GrammarCompiler, pattern: str, text: str
) -> None:
    assert accepts(compiler.regex(pattern), text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | root\n',
        'start: "[" item ("," item)* "]"\nitem: /[0-9]+/ | start\n',
        '%llguidance {}\nstart: "[" item ("," item)* "]"\nitem: NUM | start\nNUM: /[0-9]+/\n',
    ],
    ids=["gbnf", "lark", "lark with a header"],
)
def test_gbnf_and_lark_grammars_are_followed(compiler: GrammarCompiler, grammar: str) -> None:
    factory = compiler.grammar(grammar)
    assert all(accepts(factory, text) for text in ("[1]", "[12,[3],4]", "[[[0]]]"))
    assert not any(accepts(factory, text) for text in ("", "[", "[]", "[1,]", "[1]]", "1"))


class TestEnds:
    def test_a_text_that_could_go_on_is_not_complete(self, compiler: GrammarCompiler) -> None:
        constraint = compiler.choice(["no", "not"])()
        states = []
        for token in byte_ids("not"):
            constraint.accept(token)
            states.append((constraint.is_complete(), bool(allowed(constraint) & EOS)))
        assert states == [(False, False), (False, True), (True, True)]

    def test_the_end_of_text_token_completes_it(self, compiler: GrammarCompiler) -> None:
        constraint = compiler.choice(["no", "not"])()
        for token in [*byte_ids("no"), IM_END_ID]:
            constraint.accept(token)
        assert constraint.is_complete()

    def test_each_constraint_is_its_own(self, compiler: GrammarCompiler) -> None:
        factory = compiler.choice(["ab", "cd"])
        first, second = factory(), factory()
        first.accept(*byte_ids("a"))
        assert allowed(second) == set(byte_ids("ac"))
        assert allowed(first) == set(byte_ids("b"))

    def test_a_token_it_did_not_allow_fails_the_next_mask(self, compiler: GrammarCompiler) -> None:
        constraint = compiler.choice(["ab"])()
        constraint.accept(*byte_ids("z"))
        assert not constraint.is_complete()
        with pytest.raises(GrammarBroken, match="doesn't satisfy"):
            allowed(constraint)


NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}


class TestWhiteSpace:
    @pytest.mark.parametrize("indent", [None, 0, 2, 8])
    @pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
    def test_compact_and_indented_json_may_be_written(
        self, compiler: GrammarCompiler, indent: int | None, separators: tuple[str, str]
    ) -> None:
        text = json.dumps({"a": [1, 2]}, indent=indent, separators=separators)
        assert accepts(compiler.json_schema(NUMBERS), text)

    @pytest.mark.parametrize("text", ['{  "a":[]}', '{\n\n"a":[]}', ' {"a":[]}', '{"a":[]}\n'])
    def test_blanks_cannot_go_on(self, compiler: GrammarCompiler, text: str) -> None:
        assert not accepts(compiler.json_schema(NUMBERS), text)

    def test_indentation_has_an_end(self, compiler: GrammarCompiler) -> None:
        assert accepts(compiler.json_schema(NUMBERS), "{\n" + " " * 40 + '"a":[]}')
        assert not accepts(compiler.json_schema(NUMBERS), "{\n" + " " * 41 + '"a":[]}')


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(length: int) -> dict[str, Any]:
    """Definitions that each need the next: short text, deep recursion in a naive compiler."""
    links = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)}
    return {"$defs": {**links, f"d{length}": {}}, "$ref": "#/$defs/d0"}


def refusal(compile_it: Callable[[], object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compile_it()
    assert caught.value.param == "response_format"
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("", "must be an object, got str"),
        (None, "must be an object, got NoneType"),
        (False, "allows no text"),
        ({"properties": {"a": {"type": "nope"}}}, "Invalid type: nope"),
        ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
        ({"$ref": "https://example.org/schema"}, "not fetch"),
        ({"$ref": "#"}, "no text can match"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"const": float("nan")}, "not valid JSON"),
        ({"const": "\ud800"}, "not valid JSON"),
        (nested(2000), "nested deeper than 100"),
        ({"enum": ["x" * 140_000]}, "at most 131072"),
        ({"type": "integer", "multipleOf": 2**31 - 1}, "multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]}, "multipleOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
    ],
)
def test_a_bad_schema_is_refused_with_its_reason(
    compiler: GrammarCompiler, schema: Any, reason: str
) -> None:
    assert reason in refusal(lambda: compiler.json_schema(schema))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {"type": "string"}),
        ("if", {"type": "string"}),
        ("then", {"type": "string"}),
        ("else", {"type": "string"}),
        ("contains", {"type": "string"}),
        ("minContains", 1),
        ("maxContains", 1),
        ("uniqueItems", True),
        ("propertyNames", {"maxLength": 3}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {"type": "object"}}),
        ("dependencies", {"a": ["b"]}),
        ("unevaluatedItems", False),
        ("unevaluatedProperties", False),
        ("$dynamicRef", "#a"),
        ("$recursiveRef", "#"),
        ("exclusiveMinimum", True),
        ("exclusiveMaximum", True),
        ("x-guidance", {"lenient": True}),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_by_name(
    compiler: GrammarCompiler, keyword: str, value: object
) -> None:
    assert keyword in refusal(lambda: compiler.json_schema({keyword: value}))


def test_annotations_and_unknown_keywords_are_accepted(compiler: GrammarCompiler) -> None:
    notes = dict.fromkeys(("title", "description", "$comment", "x-anything"), "x")
    schema = {**notes, "default": 1, "examples": [1], "deprecated": True, "type": "integer"}
    assert accepts(compiler.json_schema(schema), "12")


def test_true_is_any_json(compiler: GrammarCompiler) -> None:
    assert accepts(compiler.json_schema(True), '[1, {"a": null}]')


@pytest.mark.parametrize("choices", [[], [""], ["a", 3], ["\ud800"], ["x" * 70_000]])
def test_a_bad_choice_is_refused(compiler: GrammarCompiler, choices: Any) -> None:
    refusal(lambda: compiler.choice(choices, param="response_format"))


@pytest.mark.parametrize("pattern", ["", "(", "\\bx", "(?!a)b", "(a)\\1", "x" * 40_000, "\ud800"])
def test_a_bad_regex_is_refused(compiler: GrammarCompiler, pattern: str) -> None:
    refusal(lambda: compiler.regex(pattern, param="response_format"))


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start: (",
        "start: start",
        "start: missing",
        'start: %json {"type": "integer", "multipleOf": 2147483647}',
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "root ::= (",
        "root ::= missing",
        'other ::= "a"',
        "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000,
        'root ::= "a"\n' + "".join(f'r{n} ::= "b"\n' for n in range(600)),
        '# "' + "x" * 70_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_grammar_is_refused(compiler: GrammarCompiler, grammar: str) -> None:
    refusal(lambda: compiler.grammar(grammar, param="response_format"))


HOSTILE: dict[str, Callable[[GrammarCompiler], object]] = {
    "nested repetitions": lambda c: c.regex("((a{1000}){1000}){1000}"),
    "ambiguous repetitions": lambda c: c.regex("(.*a.{200}){20}"),
    "optional bomb": lambda c: c.regex("(a?){5000}a{5000}"),
    "wide classes": lambda c: c.regex("(\\p{L}|\\p{N}){10000}"),
    "chain of definitions": lambda c: c.json_schema(chain(2500)),
    "product of unions": lambda c: c.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{n}-{m}": {"type": "null"}}} for m in range(4)]}
                for n in range(12)
            ]
        }
    ),
    "endless minimum": lambda c: c.json_schema({"type": "string", "minLength": 10**9}),
    "thousands of properties": lambda c: c.json_schema(
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}
    ),
    "chain of rules": lambda c: c.grammar(
        "start: r0\n" + "".join(f'r{n}:("a" r{n + 1})? "b"\n' for n in range(2500)) + 'r2500: "z"'
    ),
    "doubling terminals": lambda c: c.grammar(
        "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(60)) + 'T60: "z"'
    ),
    "endless ambiguity": lambda c: c.grammar('start: start start | "a" | ""'),
    "empty lines": lambda c: c.grammar("\n" * 65_500 + "a::=b"),
    "starts without a colon": lambda c: c.grammar("\nstart  " * 8_000 + "a::=b"),
    "a text without an end": lambda c: c.grammar('start: "' + '\\"' * 32_000),
    "a pattern without an end": lambda c: c.grammar("start: /" + "\\/" * 32_000),
    "names without an end": lambda c: c.grammar("start: " + "<a" * 32_000),
    "divisors without a small multiple": lambda c: c.json_schema(
        {"allOf": [{"multipleOf": 2**61 + n} for n in range(3_500)]}
    ),
    "fifteen hundred tagged branches": lambda c: c.json_schema(
        {
            "oneOf": [
                {"type": "object", "required": ["a"], "properties": {"a": {"const": str(n)}}}
                for n in range(1_500)
            ]
        }
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_grammar_ends_as_a_refusal_or_as_a_constraint_that_can_be_used(
    compiler: GrammarCompiler, attack: str
) -> None:
    begun_s = time.monotonic()
    try:
        factory = HOSTILE[attack](compiler)
    except InvalidRequest:
        factory = None
    assert time.monotonic() - begun_s < SECONDS_MAX
    if factory is not None:
        assert callable(factory)
        constraint = factory()
        try:
            for token in byte_ids('{"aaaa'):
                if token in allowed(constraint):
                    constraint.accept(token)
        except GrammarBroken:
            pass  # it ran out of fuel: the draw fails, nothing else does


def follow(constraint: Constraint, tokens: Sequence[int]) -> None:
    row = np.zeros((WIDTH + 31) // 32, np.int32)
    for token in tokens:
        constraint.write_mask(row)
        constraint.accept(token)


def test_an_ambiguous_grammar_is_given_up_before_its_masks_take_long() -> None:
    """Their time grows with the cube of the text, and everybody in the step waits for them."""
    words = ["a" * 2**power for power in range(6)]  # the longest is tried letter by letter
    vocab = {word: index for index, word in enumerate([*words, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    compiler = GrammarCompiler(tokenizer.to_str(), WIDTH, [len(words)])
    constraint = compiler.grammar('start: s\ns: s s s | s s | /[a-z]/ | ""')()
    tokens = [vocab["a" * 8]] * 12  # with the default limit masks only take longer and longer
    with pytest.raises(GrammarBroken, match="too ambiguous") as broken:
        follow(constraint, tokens)
    assert broken.value.param == STRUCTURED_OUTPUTS


class SlowMasks:
    """CPU time of a thread that makes masks of `mask_s` each: read once before and once after."""

    def __init__(self, mask_s: float) -> None:
        self.mask_s = mask_s
        self._now_s = 0.0
        self._is_within = False

    def __call__(self) -> float:
        self._now_s += self.mask_s if self._is_within else 0.0
        self._is_within = not self._is_within
        return self._now_s


@pytest.mark.parametrize("num_choices", [1, 8])
def test_the_masks_of_all_choices_of_a_request_have_so_much_time_together(num_choices: int) -> None:
    cpu_time = SlowMasks(MASK_S_PER_TOKEN + 0.01)  # so each token is 10 ms more than it brings
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), WIDTH, sorted(EOS), cpu_time=cpu_time)
    new_constraint = compiler.regex("a*")
    constraints = [new_constraint() for _ in range(num_choices)]
    [token] = byte_ids("a")
    num_masks = round(MASK_S_AT_FIRST / 0.01)
    for number in range(num_masks - 1):
        follow(constraints[number % num_choices], [token])
    with pytest.raises(GrammarBroken, match="takes over 2 ms a token of all choices") as broken:
        follow(constraints[0], [token] * 3)
    assert broken.value.param == STRUCTURED_OUTPUTS
    follow(compiler.regex("a*")(), [token])  # another request has its own time


def test_masks_that_take_no_longer_than_tokens_bring_go_on_for_ever() -> None:
    cpu_time = SlowMasks(MASK_S_PER_TOKEN)
    compiler = GrammarCompiler(tiny_tokenizer().to_str(), WIDTH, sorted(EOS), cpu_time=cpu_time)
    follow(compiler.regex("a*")(), byte_ids("a") * 5000)


def test_too_many_optional_properties_are_said_to_be_too_many(compiler: GrammarCompiler) -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(1000)}
    constraint = compiler.json_schema({"type": "object", "properties": properties})()
    with pytest.raises(GrammarBroken, match="over 500 optional properties"):
        follow(constraint, byte_ids('{"p1": 1'))


def test_three_hundred_optional_properties_are_not_too_many(compiler: GrammarCompiler) -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(300)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    constraint = compiler.json_schema(schema)()
    for token in byte_ids('{"p1": 1, "p17": 20, "p299": 3}'):
        assert token in allowed(constraint)
        constraint.accept(token)
    assert constraint.is_complete()


def test_compiling_leaves_the_stack_size_of_other_threads_alone(compiler: GrammarCompiler) -> None:
    before = threading.stack_size()
    compiler.choice(["a"])
    refusal(lambda: compiler.json_schema({"type": "nope"}))
    assert threading.stack_size() == before


def test_a_vocabulary_narrower_than_the_tokenizer_is_refused_at_start() -> None:
    with pytest.raises(UnsupportedModel, match="vocab size too small"):
        GrammarCompiler(tiny_tokenizer().to_str(), VOCAB_SIZE - 1, [ENDOFTEXT_ID])


@pytest.mark.parametrize(
    ("tokenizer_json", "eos_id"), [("{}", 2), (tiny_tokenizer().to_str(), 99_999)]
)
def test_a_tokenizer_that_cannot_be_followed_is_refused(tokenizer_json: str, eos_id: int) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be followed by grammars"):
        GrammarCompiler(tokenizer_json, 320, [eos_id])

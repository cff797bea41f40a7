"""Bodies that cannot be read are refused with the field's name, and never with a crash."""

import json

import pytest

from kvota.core.errors import InvalidRequest
from kvota.wire import decode
from kvota.wire.decode import DEPTH_MAX, ENTRIES_MAX, NODES_MAX, BodyDecoder, is_nested_deeper
from kvota.wire.openai import ChatRequest, CompletionRequest, StreamOptions

CHAT = BodyDecoder(ChatRequest)


def refusal(body: bytes | str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        CHAT.decode(body.encode() if isinstance(body, str) else body)
    return caught.value


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_called_that(encoding: str) -> None:
    assert "byte order mark" in refusal('{"max_tokens": 4}'.encode(encoding)).message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"max_tokens": "4"}', "max_tokens"),
        ('{"max_tokens": 1.5}', "max_tokens"),
        ('{"max_tokens": -1}', "max_tokens"),
        ('{"max_tokens": 1e12}', "max_tokens"),
        ('{"max_tokens": 1000000000000}', "max_tokens"),
        ('{"max_tokens": true}', "max_tokens"),
        ('{"n": 0}', "n"),
        ('{"n": -1}', "n"),
        ('{"temperature": 2.1}', "temperature"),
        ('{"temperature": -0.1}', "temperature"),
        ('{"temperature": "warm"}', "temperature"),
        ('{"top_p": 1.1}', "top_p"),
        ('{"top_k": -2}', "top_k"),
        ('{"min_p": 1.5}', "min_p"),
        ('{"presence_penalty": 3}', "presence_penalty"),
        ('{"repetition_penalty": 0}', "repetition_penalty"),
        ('{"top_logprobs": 21}', "top_logprobs"),
        ('{"prompt_logprobs": -1}', "prompt_logprobs"),
        ('{"seed": 9223372036854775808}', "seed"),
        ('{"logit_bias": {"5": 1000}}', "logit_bias[...]"),
        ('{"stop": 5}', "stop"),
        ('{"stop": ["a", 1]}', "stop[1]"),
        ('{"stop_token_ids": [-1]}', "stop_token_ids[0]"),
        ('{"messages": "hi"}', "messages"),
        ('{"messages": [1]}', "messages[0]"),
        ('{"messages": [{"content": "x"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user", "content": [{"text": "x"}]}]}',
         "messages[0].content[0].type"),
        ('{"stream": "yes"}', "stream"),
        ('{"response_format": "json"}', "response_format"),
        ('{"response_format": {}}', "response_format.type"),
        ('{"tools": [{"type": "function", "function": {}}]}', "tools[0].function.name"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(body: str, param: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", '"text"', "null", "17", "{'a': 1}", '{"a": NaN}', '{"temperature": NaN}',
     '{"temperature": Infinity}', '{"temperature": -Infinity}', '{"user": "\\ud800"}', "\ufeff{}"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_without_a_field(body: str) -> None:
    assert refusal(body).param is None


def test_numbers_too_large_for_a_float_are_refused() -> None:
    assert refusal('{"temperature": 1e999}').param == "temperature"
    assert refusal('{"temperature": ' + "9" * 400 + "}").param == "temperature"


def test_invalid_utf8_in_a_field_that_is_read_is_refused() -> None:
    assert refusal(b'{"model": "\xff"}').status == 400


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused_and_names_the_field(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    for depth in (DEPTH_MAX + 1, 2000):
        nested = opening * depth + ("" if opening == "[" else "1") + closing * depth
        body = '{"model": "m", "response_format": {"type": "json_schema", "json_schema": '
        error = refusal(body + '{"schema": ' + nested + "}}}")
        assert error.param == "response_format"
        assert str(DEPTH_MAX) in error.message


def test_megabytes_of_open_brackets_are_refused() -> None:
    assert refusal(b'{"tools": ' + b"[" * 4_000_000).status == 400


def test_nesting_below_the_limit_is_accepted() -> None:
    schema: object = {"type": "string"}
    for _ in range(50):
        schema = {"properties": {"a": schema}}
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    decoded = CHAT.decode(json.dumps(body).encode())
    assert decoded.response_format is not None


def test_nulls_are_the_same_as_absent() -> None:
    names = CompletionRequest.__struct_fields__
    nulls = json.dumps(dict.fromkeys(names)).encode()
    decoder = BodyDecoder(CompletionRequest)
    assert decoder.decode(nulls) == decoder.decode(b"{}")


def test_unknown_fields_are_skipped_and_of_repeated_ones_the_last_counts() -> None:
    decoded = CHAT.decode(b'{"foo": {"bar": [1]}, "n": 1, "n": 2}')
    assert decoded.n == 2


@pytest.mark.parametrize("key", ["jsno", "", "a` - at `$.x", "long" * 99])
def test_a_misspelt_form_is_refused_with_the_keys_there_are(key: str) -> None:
    """It would leave the output free, which its client would notice too late."""
    caught = refusal(json.dumps({"structured_outputs": {key: {}}}))
    assert caught.param == f"structured_outputs.{key[:64]}"
    assert caught.message == (
        f"`structured_outputs.{key[:64]}` is unknown. The keys of `structured_outputs` are regex, "
        "choice, grammar, json, json_object."
    )


def test_a_wrong_value_is_refused_although_a_right_one_follows() -> None:
    assert refusal('{"n": 0, "n": 2}').param == "n"


@pytest.mark.parametrize("depth", range(4))
def test_depth_counts_lists_dicts_and_structs(depth: int) -> None:
    value: object = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    assert is_nested_deeper(value, depth) is False
    assert is_nested_deeper(value, depth - 1) is (depth > 0)
    assert is_nested_deeper(StreamOptions(), 0) is True


@pytest.mark.parametrize(
    ("name", "entry"), [("messages", {"role": "user"}), ("tools", {"type": "function"})]
)
def test_too_many_entries_are_refused_before_anybody_looks_into_them(
    name: str, entry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = ENTRIES_MAX[name]
    CHAT.decode(json.dumps({name: [entry] * most}).encode())
    monkeypatch.delattr(decode, "_levels")
    caught = refusal(json.dumps({name: [entry] * (most + 1)}))
    assert caught.message == f"`{name}` has {most + 1} entries; the limit is {most}."
    assert caught.param == name


def test_a_field_of_very_many_parts_is_refused_before_anybody_looks_at_each() -> None:
    decoder = BodyDecoder(CompletionRequest)

    def prompts(number: int) -> bytes:
        return json.dumps({"prompt": [[1]] * number}).encode()

    with pytest.raises(InvalidRequest, match="more than 200000 lists") as caught:
        decoder.decode(prompts(NODES_MAX))
    assert caught.value.param == "prompt"
    number = NODES_MAX - 1  # and the list that holds them
    assert decoder.decode(prompts(number)).prompt == [[1]] * number


@pytest.mark.parametrize("text", [b"\\ud800", b"ab\\uDFFFcd", b"\\ud83d\\u0041"])
def test_half_of_a_surrogate_pair_is_called_that(text: bytes) -> None:
    """What cuts an emoji in two writes it; msgspec may say "Input data was truncated"."""
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        CHAT.decode(b'{"model": "' + text + b'"}')


def test_a_body_that_is_cut_is_not_blamed_on_a_whole_pair() -> None:
    with pytest.raises(InvalidRequest) as caught:
        CHAT.decode(b'{"model": "\\ud83d\\ude00", ')
    assert "surrogate" not in caught.value.message

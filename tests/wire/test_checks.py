"""Rules between fields: each refusal names the field, each harmless oddity is read as meant."""

from typing import Any

import pytest

from kvota.core.errors import InvalidRequest
from kvota.wire import checks
from kvota.wire.decode import BodyDecoder
from kvota.wire.openai import ChatRequest, CompletionRequest
from tests.wire.bodies import chat_body, completion_body

CHAT = BodyDecoder(ChatRequest)
COMPLETION = BodyDecoder(CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return CHAT.decode(chat_body(**fields))


def completion(**fields: Any) -> CompletionRequest:
    return COMPLETION.decode(completion_body(**fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"n": checks.NUM_CHOICES_MAX + 1}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
         "repetition_detection"),
        ({"thinking_token_budget": 64}, "thinking_token_budget"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"mm_payload": {"x": 1}}, "mm_payload"),
        ({"watermarking": True}, "watermarking"),
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
    ],
)  # fmt: skip
def test_chat_refuses_what_it_cannot_honour(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.check_chat(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "24h"},
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "low"},
        {"modalities": ["text"], "function_call": "none", "functions": []},
        {"reasoning_effort": "low", "parallel_tool_calls": True},
        {"stop": None, "logit_bias": {}, "n": None, "temperature": None, "tools": None,
         "tool_choice": None, "seed": None, "stream_options": None},
        {"stream_options": {}, "stop": [], "tools": []},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
        {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 0},
        {"seed": -9007199254740991}, {"best_of": 3}, {"foo": 1}, {"echo": False},
        {"include_reasoning": False, "stream_interval": 4, "session_id": "x"},
        {"watermarking": False, "return_prompt_text": False, "vllm_xargs": {}},
    ],
)  # fmt: skip
def test_chat_accepts_what_is_harmless(fields: dict[str, Any]) -> None:
    checks.check_chat(chat(**fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ],
)
def test_completions_refuse_what_they_cannot_honour(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.check_completion(completion(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields", [{"best_of": 2, "n": 2}, {"suffix": ""}, {"max_tokens": 0, "echo": True}]
)
def test_completions_accept_what_is_harmless(fields: dict[str, Any]) -> None:
    checks.check_completion(completion(**fields))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        (["", ""], ()),
        ("a", ("a",)),
        (["a", "", "b", "a"], ("a", "b")),
        ([str(i) for i in range(16)], tuple(str(i) for i in range(16))),
    ],
)
def test_stop_strings_are_read_without_empty_and_repeated_ones(
    given: Any, expected: tuple[str, ...]
) -> None:
    assert checks.stop_strings(chat(stop=given)) == expected


@pytest.mark.parametrize("given", [[str(i) for i in range(17)], ["a", ""] * 9, "x" * 257])
def test_too_many_and_too_long_stop_strings_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.stop_strings(chat(stop=given))
    assert caught.value.param == "stop"


@pytest.mark.parametrize("key", ["300", "-1", "abc", "", "1.0", " 1", "٣", "1e2", "9" * 40])
def test_bias_keys_that_are_no_token_ids_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.logit_bias(chat(logit_bias={key: 1}), vocab_size=300)
    assert caught.value.param == "logit_bias"


def test_bias_is_read_by_token_id() -> None:
    assert checks.logit_bias(chat(logit_bias={"0": -100, "299": 1.5}), 300) == {0: -100, 299: 1.5}


@pytest.mark.parametrize("token", [300, -1, 2**63])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.check_token_ids([0, token], 300, "prompt")
    assert caught.value.param == "prompt"
    assert "299" in caught.value.message


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        ({"response_format": {"type": "json_schema", "json_schema":
          {"name": "x", "schema": SCHEMA, "strict": True}}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "root ::= \"a\""}}, "grammar", "root ::= \"a\""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
        ({"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": False}},
         "regex", "a"),
    ],
)  # fmt: skip
def test_the_form_of_the_output_is_understood(
    fields: dict[str, Any], kind: str, value: Any
) -> None:
    form = checks.output_form(chat(**fields))
    assert form is not None
    assert (form.kind.value, form.value) == (kind, value)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None},
     {"structured_outputs": None}],
)  # fmt: skip
def test_free_text_has_no_form(fields: dict[str, Any]) -> None:
    assert checks.output_form(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": ""}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None, "json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x"}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "not json"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
    ],
)  # fmt: skip
def test_a_form_that_makes_no_sense_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.output_form(chat(**fields))
    assert caught.value.param == param


def test_an_empty_form_is_told_what_it_could_hold() -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.output_form(chat(structured_outputs={}))
    assert caught.value.message == (
        "`structured_outputs` sets nothing. Set one of regex, choice, grammar, json, json_object."
    )

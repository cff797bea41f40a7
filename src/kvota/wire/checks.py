"""What the fields of a request mean together, and what is refused although each alone is fine.

Each function gives the meaning of one group of fields or raises InvalidRequest with `param`.
Nulls and empty values mean "absent". Nothing here knows the model; `node/intake.py` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvota.core.errors import InvalidRequest
from kvota.wire.openai import (
    FORM_FIELDS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StructuredOutputs,
)

NUM_CHOICES_MAX: Final = 64  # n of one prompt
NUM_PROMPTS_MAX: Final = 256  # of one completions request; prompts times n has the same limit
NUM_STOPS_MAX: Final = 16  # OpenAI allows 4, vLLM any number
STOP_CHARACTERS_MAX: Final = 256
NUM_BIASES_MAX: Final = 4096
NUM_PROMPT_LOGPROBS_MAX: Final = 2_000_000  # of one answer, which holds them all: 130 MB of JSON

_USE_STRUCTURED_OUTPUTS = "use `structured_outputs` or `response_format` instead"
_USE_TOOLS = "use `tools` and `tool_choice` instead"
_TEXT_ONLY = "this server reads and writes text only"
_NOT_OFFERED = "this server does not offer it"
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "guided_json": _USE_STRUCTURED_OUTPUTS,
    "guided_regex": _USE_STRUCTURED_OUTPUTS,
    "guided_choice": _USE_STRUCTURED_OUTPUTS,
    "guided_grammar": _USE_STRUCTURED_OUTPUTS,
    "use_beam_search": _NOT_OFFERED,
    "truncate_prompt_tokens": "prompts are never cut; shorten the prompt instead",
    "allowed_token_ids": "use `logit_bias` or `structured_outputs` instead",
    "bad_words": "use `logit_bias` instead",
    "logits_processors": _NOT_OFFERED,
    "return_tokens_as_token_ids": "use `return_token_ids` instead",
    "prompt_embeds": _NOT_OFFERED,
    "logprob_token_ids": "use `top_logprobs` instead",
    "repetition_detection": "use `repetition_penalty` or `frequency_penalty` instead",
    "thinking_token_budget": "use `max_tokens` instead",
    "vllm_xargs": _NOT_OFFERED,
    "kv_transfer_params": _NOT_OFFERED,
    "mm_payload": _TEXT_ONLY,
    "watermarking": _NOT_OFFERED,
    "return_prompt_text": "POST the messages to /tokenize and its tokens to /detokenize instead",
    "chat_template": "the model's own template is used; use `chat_template_kwargs` to steer it",
    "documents": "put the documents into the messages instead",
    "audio": _TEXT_ONLY,
    "functions": _USE_TOOLS,
    "web_search_options": _NOT_OFFERED,
    "moderation": _NOT_OFFERED,
    "suffix": "this server does not fill in the middle",
}


_WRITE_A_GRAMMAR = "write a `grammar` instead"
_UNSUPPORTED_IN_FORM: Final[Mapping[str, str]] = {
    "structural_tag": _WRITE_A_GRAMMAR,
    "disable_any_whitespace": _WRITE_A_GRAMMAR,
    "disable_additional_properties": "put `additionalProperties: false` into the schema instead",
    "whitespace_pattern": _WRITE_A_GRAMMAR,
}


class FormKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Form:
    """What the output must look like. `param` is the field that asked for it."""

    kind: FormKind
    value: Any  # the schema, pattern, options or grammar; None for JSON_OBJECT
    param: str


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise for a field that would change the answer and that kvota cannot honour."""
    for name, advice in _UNSUPPORTED.items():
        if is_given(getattr(request, name, None)):
            raise InvalidRequest(f"`{name}` is not supported: {advice}.", param=name)


def check_generation(request: GenerationFields) -> None:
    """The rules that chat and completions share, as far as no other function states them."""
    refuse_unsupported(request)
    if not request.model:
        raise InvalidRequest("`model` is missing. GET /v1/models lists the names.", param="model")
    if (request.n or 1) > NUM_CHOICES_MAX:
        raise InvalidRequest(
            f"`n` is {request.n}; at most {NUM_CHOICES_MAX} choices are possible.", param="n"
        )
    options = request.stream_options
    if not request.stream and options is not None and is_given(options.include_usage):
        raise InvalidRequest(
            "`stream_options` is only allowed with `stream: true`.", param="stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest(
            "`prompt_logprobs` is not available in streams.", param="prompt_logprobs"
        )


def check_chat(request: ChatRequest) -> None:
    check_generation(request)
    if request.echo:
        raise InvalidRequest("`echo` is not supported on chat.", param="echo")
    if request.function_call not in (None, "none", "auto"):
        raise InvalidRequest(
            f"`function_call` is not supported: {_USE_TOOLS}.", param="function_call"
        )
    if request.modalities and set(request.modalities) != {"text"}:
        raise InvalidRequest(f'`modalities` must be ["text"]: {_TEXT_ONLY}.', param="modalities")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    check_ending(request)
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(request, name) == 0:
            raise InvalidRequest(f"`{name}` must be at least 1.", param=name)


def check_ending(request: ChatRequest) -> None:
    """How the prompt ends: open, or with the words that begin an answer."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            param="continue_final_message",
        )


def check_completion(request: CompletionRequest) -> None:
    check_generation(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest(
            "`best_of` must equal `n`: this server does not rank hidden choices.", param="best_of"
        )
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` may be 0 only with `echo: true`.", param="max_tokens")


def is_given(value: Any) -> bool:
    """False for null and for the empty values that clients send to mean "absent"."""
    return value is not None and value is not False and value not in ("", [], {})


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    """The stop strings, without empty ones (an empty string would stop everything at once)."""
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(given) > NUM_STOPS_MAX:  # before they are looked at: a body has room for millions
        raise InvalidRequest(
            f"`stop` has {len(given)} strings; the limit is {NUM_STOPS_MAX}.", param="stop"
        )
    stops = tuple(dict.fromkeys(text for text in given if text))
    if any(len(text) > STOP_CHARACTERS_MAX for text in stops):
        raise InvalidRequest(
            f"A string in `stop` is over the limit of {STOP_CHARACTERS_MAX} characters.",
            param="stop",
        )
    return stops


def logit_bias(request: GenerationFields, vocab_size: int) -> dict[int, float]:
    """Token id to bias. Every id must be in the vocabulary."""
    given = request.logit_bias or {}
    if len(given) > NUM_BIASES_MAX:
        raise InvalidRequest(
            f"`logit_bias` has {len(given)} entries; the limit is {NUM_BIASES_MAX}.",
            param="logit_bias",
        )
    return {_token_id(key, vocab_size): bias for key, bias in given.items()}


def _token_id(key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 16 and int(key) < vocab_size):
        raise InvalidRequest(
            f"`logit_bias` has the key {key[:32]!r}; keys are token ids, 0 to {vocab_size - 1}.",
            param="logit_bias",
        )
    return int(key)


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raise unless every id is in the vocabulary."""
    if not ids:
        return
    for token in (min(ids), max(ids)):  # millions are looked at without a loop of ours
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"`{param}` has the token id {token}; ids are 0 to {vocab_size - 1}.", param=param
            )


def check_num_prompt_logprobs(num_tokens: int, num_top: int, param: str) -> None:
    """Raise where the log probabilities of `num_tokens` prompt tokens are too many to answer.

    `num_tokens` counts a prompt as often as it has choices.
    """
    num_values = num_tokens * (1 + num_top)
    if num_values > NUM_PROMPT_LOGPROBS_MAX:
        raise InvalidRequest(
            f"`{param}` asks for {num_values} log probabilities of prompt tokens, over all prompts "
            f"and choices; the limit is {NUM_PROMPT_LOGPROBS_MAX}.",
            param=param,
        )


def output_form(request: GenerationFields) -> Form | None:
    """The form that `response_format` or `structured_outputs` asks for; None for free text."""
    by_format = _response_form(request)
    asked = request.structured_outputs
    by_vllm = _structured_form(asked) if asked is not None else None
    if by_format is not None and by_vllm is not None:
        raise InvalidRequest(
            "`response_format` and `structured_outputs` exclude each other.",
            param="structured_outputs",
        )
    return by_format or by_vllm


def _response_form(request: GenerationFields) -> Form | None:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Form(FormKind.JSON_OBJECT, None, "response_format")
    if asked.type != "json_schema":
        raise InvalidRequest(
            "`response_format.type` must be text, json_object or json_schema.",
            param="response_format.type",
        )
    schema = asked.json_schema.schema if asked.json_schema else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "`response_format.json_schema.schema` must be a JSON schema object.",
            param="response_format.json_schema.schema",
        )
    return Form(FormKind.JSON_SCHEMA, schema, "response_format")


def _structured_form(asked: StructuredOutputs) -> Form:
    for name, advice in _UNSUPPORTED_IN_FORM.items():
        if is_given(getattr(asked, name)):
            param = f"structured_outputs.{name}"
            raise InvalidRequest(f"`{param}` is not supported: {advice}.", param=param)
    forms = [
        Form(FormKind.REGEX, asked.regex, "structured_outputs.regex"),
        Form(FormKind.CHOICE, asked.choice, "structured_outputs.choice"),
        Form(FormKind.GRAMMAR, asked.grammar, "structured_outputs.grammar"),
        Form(FormKind.JSON_SCHEMA, _schema(asked.json), "structured_outputs.json"),
    ]
    given = [form for form in forms if form.value is not None]
    if asked.json_object:
        given.append(Form(FormKind.JSON_OBJECT, None, "structured_outputs.json_object"))
    if len(given) != 1:
        raise _not_one_form(given)
    if given[0].kind is FormKind.CHOICE and not asked.choice:
        raise InvalidRequest("`structured_outputs.choice` is empty.", param=given[0].param)
    return given[0]


def _not_one_form(given: list[Form]) -> InvalidRequest:
    names = ", ".join(form.param for form in given)
    message = (
        f"Only one of {names} may be set."
        if given
        else f"`structured_outputs` sets nothing. Set one of {', '.join(FORM_FIELDS)}."
    )
    return InvalidRequest(message, param="structured_outputs")


def _schema(given: str | dict[str, Any] | None) -> Any:
    """A JSON schema that vLLM's clients may also send as a string of JSON."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(
            "`structured_outputs.json` must be a JSON schema object.",
            param="structured_outputs.json",
        ) from None

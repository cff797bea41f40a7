"""How much a request may ask, before anything is computed for it.

The body's size is limited while it is read (edge/exchange.py), its types and ranges while it is
decoded (wire/). Here are the limits that an operator sets on what it says. Lengths are counted in
characters, because no tokenizer has seen the text yet: a generous bound against abuse, where the
model's own limit in tokens comes later.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvota.core.errors import InvalidRequest, OutputTooLong
from kvota.wire.decode import DEPTH_MAX, is_nested_deeper
from kvota.wire.openai import ChatRequest, CompletionRequest, GenerationFields, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """None: no limit beside those of the wire and of the model."""

    nesting_max: int = 64  # of lists and objects inside each other
    num_messages_max: int = 1024
    prompt_characters_max: int = 1_000_000  # of all messages and tools, or of all prompts
    output_tokens_max: int | None = None  # of one choice
    num_choices_max: int = 16  # n, and prompts times n
    num_inputs_max: int = 2048  # texts to embed


def check_input(
    request: ChatRequest | CompletionRequest, limits: InputLimits, content: bytes | None = None
) -> None:
    """Raises InvalidRequest or OutputTooLong, with the field, the limit and what was asked.

    `content` is the request's body. Most are too short, and have too few brackets, for anything
    inside to be over its limit; those are not looked through.
    """
    if content is None or content.count(b"[") + content.count(b"{") > limits.nesting_max:
        _check_nesting(request, limits.nesting_max)
    is_short = content is not None and len(content) <= limits.prompt_characters_max
    if isinstance(request, ChatRequest):
        _check_messages(request.messages or [], limits.num_messages_max)
        if not is_short:
            length = num_characters([request.messages, request.tools])
            check_length("messages", length, limits.prompt_characters_max)
        _check_choices(request.n or 1, "n", limits.num_choices_max)
    else:
        if not is_short:
            check_length("prompt", num_characters(request.prompt), limits.prompt_characters_max)
        num_choices = (request.n or 1) * num_prompts(request.prompt)
        _check_choices(num_choices, "prompt", limits.num_choices_max)
    _check_output(request, limits.output_tokens_max)


def num_characters(value: Any) -> int:
    """Characters of all texts inside; a token id counts as one."""
    match value:
        case str():
            return len(value)
        case bool() | None:
            return 0
        case int():
            return 1
        case list():
            if value and all(type(inner) is int for inner in value):
                return len(value)
            return sum(map(num_characters, value))
        case dict():
            return sum(len(key) + num_characters(inner) for key, inner in value.items())
        case msgspec.Struct():
            return sum(num_characters(getattr(value, name)) for name in value.__struct_fields__)
        case _:
            return 0


def num_prompts(prompt: str | list[Any] | None) -> int:
    """Of a completions request: a list of token ids is one prompt."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _check_nesting(request: GenerationFields, nesting_max: int) -> None:
    if nesting_max >= DEPTH_MAX:
        return  # decoding has seen to that
    for name in request.__struct_fields__:
        if is_nested_deeper(getattr(request, name), nesting_max):
            raise InvalidRequest(
                f"`{name}` nests lists and objects deeper than the limit of {nesting_max}.",
                param=name,
            )


def _check_messages(messages: Iterable[Message], num_max: int) -> None:
    number = len(list(messages))
    if number > num_max:
        raise InvalidRequest(
            f"`messages` has {number} entries; the limit here is {num_max}.", param="messages"
        )


def check_length(name: str, length: int, length_max: int) -> None:
    if length > length_max:
        raise InvalidRequest(
            f"`{name}` has {length} characters; the limit here is {length_max}.", param=name
        )


def _check_choices(number: int, param: str, num_max: int) -> None:
    if number > num_max:
        raise InvalidRequest(
            f"The request asks for {number} answers; the limit here is {num_max}.", param=param
        )


def _check_output(request: ChatRequest | CompletionRequest, tokens_max: int | None) -> None:
    asked, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, name = request.max_completion_tokens, "max_completion_tokens"
    if tokens_max is not None and asked is not None and asked > tokens_max:
        raise OutputTooLong(
            f"`{name}` is {asked}; this server gives at most {tokens_max} per answer.", param=name
        )

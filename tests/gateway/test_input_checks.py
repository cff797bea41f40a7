from typing import Any

import msgspec
import pytest

from kvota.core.errors import InvalidRequest, OutputTooLong, RequestError
from kvota.gateway.input_checks import InputLimits, check_input, num_characters, num_prompts
from kvota.wire.openai import ChatRequest, CompletionRequest

LIMITS = InputLimits(
    nesting_max=6,
    num_messages_max=3,
    prompt_characters_max=40,
    output_tokens_max=10,
    num_choices_max=4,
)


def chat(**fields: Any) -> ChatRequest:
    messages = fields.pop("messages", [{"role": "user", "content": "hello"}])
    return msgspec.convert({"messages": messages, **fields}, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert(fields, CompletionRequest)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "request_",
    [
        chat(),
        chat(messages=[user("a"), user("b"), user("c")], n=4, max_tokens=10),
        chat(messages=[user("x" * 36)]),  # the role counts too
        chat(max_tokens=99, max_completion_tokens=10),
        completion(prompt="x" * 40, n=4),
        completion(prompt=[7] * 40, max_tokens=10),
        completion(prompt=["a", "b"], n=2),
        completion(prompt=[[1], [2]], n=2),
        completion(),
    ],
)
def test_what_is_within_all_limits_passes(request_: ChatRequest | CompletionRequest) -> None:
    check_input(request_, LIMITS)
    check_input(request_, LIMITS, msgspec.json.encode(request_))


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        (chat(messages=[user("a")] * 4), "messages", "4 entries; the limit here is 3"),
        (chat(messages=[user("x" * 37)]), "messages", "41 characters; the limit here is 40"),
        (
            chat(messages=[user([{"type": "text", "text": "x" * 20}] * 2)]),
            "messages",
            "characters",
        ),
        (
            chat(tools=[{"type": "function", "function": {"name": "f", "description": "x" * 40}}]),
            "messages",
            "characters",
        ),
        (chat(n=5), "n", "5 answers; the limit here is 4"),
        (chat(chat_template_kwargs=nested(7)), "chat_template_kwargs", "limit of 6"),
        (completion(prompt="x" * 41), "prompt", "41 characters"),
        (completion(prompt=[7] * 41), "prompt", "41 characters"),
        (completion(prompt=["a", "b", "c"], n=2), "prompt", "6 answers"),
    ],
)
def test_what_is_over_a_limit_is_named_with_both_numbers(
    request_: ChatRequest | CompletionRequest, param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        check_input(request_, LIMITS)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat(max_tokens=11), "max_tokens"),
        (chat(max_tokens=1, max_completion_tokens=11), "max_completion_tokens"),
        (completion(prompt="a", max_tokens=11), "max_tokens"),
    ],
)
def test_too_long_an_output_has_its_own_code(
    request_: ChatRequest | CompletionRequest, param: str
) -> None:
    with pytest.raises(OutputTooLong, match="11; this server gives at most 10") as refused:
        check_input(request_, LIMITS)
    assert refused.value.param == param


def test_without_a_limit_on_output_any_is_asked() -> None:
    check_input(chat(max_tokens=10**6), InputLimits())


def test_characters_of_everything_are_counted() -> None:
    assert num_characters(["ab", {"key": ["中文", 5, None, True, 1.5]}, [1, 2, 3]]) == 11
    assert num_characters(None) == 0


def test_a_list_of_token_ids_is_one_prompt() -> None:
    assert [num_prompts(p) for p in (None, "a", [1, 2], ["a", "b"], [[1], [2], [3]], [])] == [
        1, 1, 1, 2, 3, 1,
    ]  # fmt: skip


def test_errors_are_the_clients_own() -> None:
    with pytest.raises(RequestError) as refused:
        check_input(chat(n=5), LIMITS)
    assert refused.value.status == 400

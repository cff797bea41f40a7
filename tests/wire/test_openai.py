"""Every field that OpenAI documents is known: read, refused by name, or ignored on purpose."""

import msgspec
import pytest

from kvota.wire import openai

# Taken from OpenAI's published description of the two request bodies.
CHAT_FIELDS = """
    metadata top_logprobs temperature top_p user safety_identifier prompt_cache_key
    prompt_cache_retention prompt_cache_options messages model service_tier modalities verbosity
    reasoning_effort max_completion_tokens frequency_penalty presence_penalty web_search_options
    response_format audio store moderation stream stop logit_bias logprobs max_tokens n prediction
    seed stream_options tools tool_choice parallel_tool_calls function_call functions
"""
COMPLETION_FIELDS = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    seed stop stream stream_options suffix temperature top_p user
"""


@pytest.mark.parametrize(
    ("kind", "documented"),
    [(openai.ChatRequest, CHAT_FIELDS), (openai.CompletionRequest, COMPLETION_FIELDS)],
)
def test_every_documented_field_is_known(kind: type[msgspec.Struct], documented: str) -> None:
    names = documented.split()
    read = {field.name for field in msgspec.structs.fields(kind)}
    ignored = {name for name in names if f"`{name}`" in (openai.__doc__ or "")}
    assert set(names) <= read | ignored
    assert not read & ignored

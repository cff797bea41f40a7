"""What we answer, field by field as OpenAI publishes it; vLLM's extras only when asked for.

A streamed chunk and a finished body are built from the same pieces, see `node/answer.py`.
`UNSET` fields are left out; None is written as null.
"""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

StopReason = str | int | UnsetType  # vLLM's: which of the client's stop strings or token ids it was


class PromptTokensDetails(Struct):
    cached_tokens: int  # of the prompt, found in the prefix cache; 0 when there were none


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# --- logprobs


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]  # joined over all tokens they decode to the content
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Four lists of the same length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None only for the very first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of the choice's text before the token


# --- chat


class FunctionPart(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPart(Struct, kw_only=True):
    """What a stream adds to one tool call: everything but the arguments comes first, once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionText(Struct):
    name: str
    arguments: str


class FinishedToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionText


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[FinishedToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
EncodedPromptLogprobs = Raw  # the same as JSON, a quarter of the size in memory


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: EncodedPromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# --- completions


class CompletionChoice(Struct, kw_only=True):
    """Both the choice of a finished body and what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: EncodedPromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Both a finished body and a chunk: OpenAI gives them the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# --- the rest


class ErrorBody(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    error: ErrorBody


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvota"
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str

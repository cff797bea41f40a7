"""What clients send, as structs: OpenAI's fields, vLLM's extras, and `use_prefix_cache`.

Types and ranges are stated here and enforced while decoding; rules between fields are in
`checks.py`. Every field may be null, which means absent. Unknown fields are skipped.

Known and without effect, because the answer means the same without them: `user`,
`safety_identifier`, `metadata`, `store`, `service_tier`, `prediction`, `verbosity`,
`prompt_cache_key`, `prompt_cache_options`, `prompt_cache_retention`, `include_obfuscation`,
vLLM's `priority`, `request_id`, `session_id`, `spaces_between_special_tokens`, `length_penalty`,
`early_stopping`, `include_reasoning`, `stream_interval`, `truncation_side`, and what it reads of
images and of mixtures of experts. Fields that would change the answer and that kvota cannot honour
are typed `Unsupported` and refused by name.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

INT64_MAX = 2**63 - 1
TOKENS_MAX = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Unsupported = Any

FORM_FIELDS = ("regex", "choice", "grammar", "json", "json_object")  # of StructuredOutputs


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # running usage on every chunk
    whole_tool_calls: bool | None = None  # ours: the stream is put together before it is read


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling of "the output must follow this". Exactly one field must be set.

    A misspelt key would leave the output free, so unknown ones are refused here.
    """

    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json: str | dict[str, Any] | None = None
    json_object: bool | None = None

    structural_tag: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class GenerationFields(Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    n: PositiveCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Ratio | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None

    # vLLM's dialect
    top_k: TopK | None = None  # -1 and 0 mean all tokens
    min_p: Ratio | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None

    # ours
    use_prefix_cache: bool | None = None  # false: neither read nor leave reusable KV

    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    use_beam_search: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    logits_processors: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    prompt_embeds: Unsupported = None
    logprob_token_ids: Unsupported = None
    repetition_detection: Unsupported = None
    thinking_token_budget: Unsupported = None
    vllm_xargs: Unsupported = None
    kv_transfer_params: Unsupported = None
    mm_payload: Unsupported = None
    watermarking: Unsupported = None


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True, omit_defaults=True):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # some templates show earlier reasoning again
    reasoning: Any = None  # its newer name; other clients keep objects there, which are passed over
    function_call: Unsupported = None
    audio: Unsupported = None


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, omit_defaults=True):
    type: str
    function: FunctionDefinition | None = None


class FunctionName(Struct, kw_only=True):
    name: str


class AllowedTools(Struct, kw_only=True):
    mode: str
    tools: list[Tool]


class ToolChoice(Struct, kw_only=True):
    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None  # given to the template, which may know it

    # vLLM's dialect
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Unsupported = None
    documents: Unsupported = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    echo: Unsupported = None
    return_prompt_text: Unsupported = None


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any] | None = None  # text, texts, token ids, or lists of token ids
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Count | None = None
    suffix: Unsupported = None


class TokenizeRequest(ChatRequest, kw_only=True):
    """The body of POST /tokenize: a prompt, or whatever one would send to chat."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] | None = None

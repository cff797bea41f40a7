"""How long a prompt is, for the price of its ticket and for limits, before anything is sent.

Three ways, best first: the model's tokenizer, where one was handed in; the backend itself; a guess
from the bytes (`estimate.py`). The backend's own usage corrects whatever was counted here as soon
as it comes, so a guess prices the way in and never the bill.

Every counter takes the client's body, of /v1/chat/completions or /v1/completions, and gives the
tokens of all its prompts together.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from kvota.core.errors import ConfigError, KvotaError
from kvota.gateway.upstream.connection import Upstream
from kvota.gateway.upstream.estimate import estimated_tokens
from kvota.gateway.upstream.kinds import TokenizeForm

COUNT_TIMEOUT_S: Final = 2.0  # for all prompts of a request together
QUESTIONS_MAX: Final = 16  # to a backend's tokenizer, about one request: a text each
_INLINE_BYTES_MAX: Final = 8_000  # of a body: a tokenizer takes about a millisecond for it
# What a chat template puts around a message (ChatML and Llama 3: 5), and around them all, with a
# system prompt that some templates add by themselves (Qwen 2.5: about 20).
TOKENS_PER_MESSAGE: Final = 6
TOKENS_PER_CHAT: Final = 24
_SHAPES_TEMPLATE: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
)
_NOT_TEXT: Final = frozenset({"role", "type", "image_url", "input_audio", "id", "tool_call_id"})
T = TypeVar("T")
_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class PromptCount:
    tokens: int
    is_exact: bool  # by the tokenizer and the template that the backend will use


class PromptCounter(Protocol):
    async def count(self, body: bytes) -> PromptCount:
        """Never raises for a body that has been checked; at least 1."""


class ChatTokenizer(Protocol):
    """A model's tokenizer with its chat template, in this process."""

    def count_text(self, text: str) -> int:
        """With what the model puts around a plain prompt (usually BOS)."""

    def count_chat(self, chat: Mapping[str, Any]) -> int:
        """Of the rendered template. `chat` has the fields of a chat request."""


OpenTokenizer = Callable[[str], ChatTokenizer]  # by its path; raises ConfigError


def no_tokenizer(path: str) -> ChatTokenizer:
    """For a gateway that was given no reader of tokenizers."""
    raise ConfigError(f"No tokenizer can be read from {path} here.")


class EstimatingCounter:
    """Needs nothing, and is never far too low."""

    async def count(self, body: bytes) -> PromptCount:
        return PromptCount(max(1, estimate(body)), is_exact=False)


class TokenizerCounter:
    """Exact where the template takes the messages; long bodies are counted on a thread."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def count(self, body: bytes) -> PromptCount:
        try:
            if len(body) <= _INLINE_BYTES_MAX:
                tokens = self._tokens(body)
            else:
                tokens = await asyncio.to_thread(self._tokens, body)
        except (KvotaError, msgspec.MsgspecError):  # the backend will say what is wrong with it
            return PromptCount(max(1, estimate(body)), is_exact=False)
        return PromptCount(max(1, tokens), is_exact=True)

    def _tokens(self, body: bytes) -> int:
        request: dict[str, Any] = msgspec.json.decode(body)
        if request.get("messages") is not None:
            return self._tokenizer.count_chat(request)
        return sum(
            self._tokenizer.count_text(prompt) if isinstance(prompt, str) else len(prompt)
            for prompt in prompts_of(request.get("prompt"))
        )


class BackendCounter:
    """Asks the backend's own tokenizer; guesses where that fails or takes too long, and where it
    would have to be asked too often.
    """

    def __init__(
        self, upstream: Upstream, form: TokenizeForm, *, model: str,
        timeout_s: float = COUNT_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._upstream = upstream
        self._of_chat, self._of_text = {
            TokenizeForm.VLLM: (self._vllm_chat, self._vllm_text),
            TokenizeForm.LLAMACPP: (self._llamacpp_chat, self._llamacpp_text),
            TokenizeForm.TGI: (self._tgi_chat, self._tgi_text),
        }[form]
        self._model = model
        self._timeout_s = timeout_s

    async def count(self, body: bytes) -> PromptCount:
        fields = _fields.decode(body)
        try:
            async with asyncio.timeout(self._timeout_s):
                tokens = await self._count(fields)
        except (KvotaError, msgspec.MsgspecError, TimeoutError):
            tokens = None
        if tokens is None:
            return PromptCount(max(1, estimate(body)), is_exact=False)
        return PromptCount(max(1, tokens), is_exact=True)

    async def _count(self, fields: _Fields) -> int | None:
        """None: too many questions."""
        if "messages" in fields:
            return await self._of_chat(_chat(fields))
        prompts = [*prompts_of(msgspec.json.decode(fields.get("prompt", b"null")))]
        texts = [one for one in prompts if isinstance(one, str)]
        if len(texts) > QUESTIONS_MAX:
            return None
        tokens = sum(len(one) for one in prompts if not isinstance(one, str))
        for text in texts:
            tokens += await self._of_text(text)
        return tokens

    async def _vllm_chat(self, chat: dict[str, Any]) -> int:
        return (await self._post("/tokenize", {"model": self._model, **chat}, _VllmCount)).count

    async def _vllm_text(self, text: str) -> int:
        question = {"model": self._model, "prompt": text}
        return (await self._post("/tokenize", question, _VllmCount)).count

    async def _llamacpp_chat(self, chat: dict[str, Any]) -> int:
        rendered = await self._post("/apply-template", chat, _LlamacppPrompt)
        return await self._llamacpp_text(rendered.prompt)

    async def _llamacpp_text(self, text: str) -> int:
        question = {"content": text, "add_special": True, "parse_special": True}
        return len((await self._post("/tokenize", question, _LlamacppTokens)).tokens)

    async def _tgi_chat(self, chat: dict[str, Any]) -> int:
        return len((await self._post("/chat_tokenize", chat, _TgiChat)).tokens)

    async def _tgi_text(self, text: str) -> int:
        return len(await self._post("/tokenize", {"inputs": text}, list[msgspec.Raw]))

    async def _post(self, path: str, question: Mapping[str, Any], kind: type[T]) -> T:
        body = msgspec.json.encode(question)
        answer = await self._upstream.fetch(path, body=body, timeout_s=self._timeout_s)
        return msgspec.json.decode(answer, type=kind)


class _VllmCount(msgspec.Struct):
    count: int


class _LlamacppPrompt(msgspec.Struct):
    prompt: str


class _LlamacppTokens(msgspec.Struct):
    tokens: list[msgspec.Raw]


class _TgiChat(msgspec.Struct):
    tokens: list[msgspec.Raw] = msgspec.field(name="tokenize_response")


def _chat(fields: _Fields) -> dict[str, Any]:
    """What of a chat request decides how its template is filled in."""
    return {name: fields[name] for name in _SHAPES_TEMPLATE if name in fields}


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _PlainChat(msgspec.Struct):
    """A chat of texts and nothing else, as most are: it takes one look."""

    messages: list[_PlainMessage]
    tools: None = None


_plain_chat = msgspec.json.Decoder(_PlainChat)


def estimate(body: bytes) -> int:
    """A guess at the tokens of a body's prompts, by their bytes."""
    try:
        texts = [one.content for one in _plain_chat.decode(body).messages]
    except msgspec.ValidationError:
        return _estimate_any(body)
    return _of_chat(len(texts), texts)


def _estimate_any(body: bytes) -> int:
    fields = _fields.decode(body)
    if "messages" not in fields:
        prompts = prompts_of(msgspec.json.decode(fields.get("prompt", b"null")))
        return sum(
            estimated_tokens(one.encode()) + 1 if isinstance(one, str) else len(one)
            for one in prompts
        )
    messages = msgspec.json.decode(fields["messages"]) or []
    tools = bytes(fields.get("tools", b"null"))
    chat = _of_chat(len(messages), _texts(messages))
    return chat if tools == b"null" else chat + estimated_tokens(tools)


def _of_chat(num_messages: int, texts: Iterable[str]) -> int:
    """All texts in one look."""
    tokens = estimated_tokens("".join(texts).encode())
    return TOKENS_PER_CHAT + TOKENS_PER_MESSAGE * num_messages + tokens


def prompts_of(given: Any) -> Iterator[str | Sequence[int]]:
    """OpenAI's four forms of `prompt`: a text, texts, token ids, or lists of token ids."""
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    yield from [given] if is_one else given or ()


def _texts(value: Any) -> Iterator[str]:
    """All that messages say, tool calls as well. Images are not counted: we serve text."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            todo.extend(one)
        elif isinstance(one, dict):
            todo.extend(field for name, field in one.items() if name not in _NOT_TEXT)

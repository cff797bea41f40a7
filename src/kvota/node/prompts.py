"""From what the client wrote to the token ids of each prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvota.core.errors import InvalidRequest
from kvota.node.budget import refuse_hopeless
from kvota.node.served import ChatTemplate, ServedModel
from kvota.node.settings import HttpSettings
from kvota.node.tools import ToolPlan
from kvota.node.workbench import Seat
from kvota.wire.checks import NUM_PROMPTS_MAX, check_token_ids
from kvota.wire.messages import template_messages
from kvota.wire.openai import ChatRequest, CompletionRequest

T = TypeVar("T")

_FINAL_END = "kvota-final-message-ends-here"


class ChatPrompt:
    """The messages of one chat request, ready to be rendered. Raises InvalidRequest at once."""

    def __init__(self, model: ServedModel, body: ChatRequest, tools: ToolPlan | None) -> None:
        if model.template is None:
            raise InvalidRequest(
                f"The model `{model.name}` has no chat template. Use /v1/completions instead.",
                param="messages",
            )
        self._template: ChatTemplate = model.template
        self._model = model
        self._messages = template_messages(body.messages)
        self._tools: Sequence[Mapping[str, Any]] | None = list(tools.tools) if tools else None
        self._continues = bool(body.continue_final_message)
        self._prompts_answer = body.add_generation_prompt is not False and not self._continues
        self._adds_special = bool(body.add_special_tokens)
        self._extra = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            self._extra.setdefault("reasoning_effort", body.reasoning_effort)

    async def encode(self, bench: Seat, settings: HttpSettings) -> list[int]:
        """The prompt's token ids; the template is somebody's program, so it runs on the bench."""
        return await bench.run(
            self._ids,
            limit_s=settings.prompt_timeout_s,
            what="rendering and tokenizing the messages",
            param="messages",
        )

    def _ids(self) -> list[int]:
        text = self.text()
        refuse_hopeless(len(text), self._model, "messages")
        return self._model.tokenizer.encode(text, add_special_tokens=self._adds_special)

    def text(self) -> str:
        return self._open_ended() if self._continues else self._rendered(self._messages)

    def _open_ended(self) -> str:
        """The prompt up to the last character of the last message, so that the answer goes on.

        Found by a mark behind it, as Transformers does: its own text may occur in what the
        template writes after it. Its last spaces stay where the template keeps the mark's own.
        """
        *earlier, final = self._messages
        marked = {**final, "content": f"{final['content']}{_FINAL_END} "}
        text, mark, rest = self._rendered([*earlier, marked]).rpartition(_FINAL_END)
        if not mark or not final["content"].strip():
            raise InvalidRequest(
                "`continue_final_message` needs a last message whose text the template keeps.",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return _blaming(
            "messages",
            lambda: self._template.render(
                messages,
                tools=self._tools,
                add_generation_prompt=self._prompts_answer,
                extra=self._extra,
            ),
        )


async def encode_texts(
    texts: Sequence[str], *, adds_special: bool, model: ServedModel, bench: Seat,
    settings: HttpSettings,
) -> list[list[int]]:  # fmt: skip
    """The token ids of every text; long ones are tokenized on the bench."""

    def encode_all() -> list[list[int]]:
        encode = model.tokenizer.encode
        return [encode(text, add_special_tokens=adds_special) for text in texts]

    for text in texts:
        refuse_hopeless(len(text), model, "prompt")
    if sum(map(len, texts)) <= settings.inline_characters_max:
        return _blaming("prompt", encode_all)
    return await bench.run(
        lambda: _blaming("prompt", encode_all),
        limit_s=settings.prompt_timeout_s,
        what="tokenizing the prompt",
        param="prompt",
    )


async def written(
    write: Callable[[], T], num_tokens: int, param: str, *, bench: Seat,
    settings: HttpSettings,
) -> T:  # fmt: skip
    """What `write` makes of so many tokens; many are written beside the event loop, not on it."""
    if num_tokens <= settings.inline_characters_max:
        return write()
    return await bench.run(
        write,
        limit_s=settings.prompt_timeout_s,
        what="writing the text of the tokens",
        param=param,
    )


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """The prompts of a completions request: either `texts` or `ids`, the other one is None."""

    texts: list[str] | None
    ids: list[list[int]] | None


def given_prompts(body: CompletionRequest, model: ServedModel) -> GivenPrompts:
    """What `prompt` holds. Raises InvalidRequest naming `prompt`."""
    prompts = _separated(body.prompt)
    num_choices = len(prompts) * (body.n or 1)
    if num_choices > NUM_PROMPTS_MAX:
        raise InvalidRequest(
            f"`prompt` and `n` ask for {num_choices} answers at once; the limit is "
            f"{NUM_PROMPTS_MAX}.",
            param="prompt",
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return GivenPrompts(texts, None)
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    for index, prompt in enumerate(ids):
        check_token_ids(prompt, model.vocab_size, f"prompt[{index}]" if len(ids) > 1 else "prompt")
    return GivenPrompts(None, ids)


def _separated(prompt: str | list[Any] | None) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` is missing or empty.", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or (kinds == {list} and all(map(_is_token_list, prompt))):
        return prompt
    raise InvalidRequest(
        "`prompt` must be a string, a list of strings, a list of token ids, or a list of such "
        "lists, none of them empty.",
        param="prompt",
    )


def _is_token_list(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}


def _blaming(param: str, work: Callable[[], T]) -> T:
    """The work's result; an InvalidRequest that names no field gets this one."""
    try:
        return work()
    except InvalidRequest as error:
        if error.param is None:
            error.param = param
        raise

"""A model's tokenizer and chat template, for a gateway that prices prompts for a foreign engine.

Handed to the gateway, which knows no model: a directory with `tokenizer.json` and its neighbours,
as the engine itself was given, or a GGUF file. Needs neither weights nor OpenVINO.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvota.core.errors import ConfigError, StartupError
from kvota.formats.gguf_parts import read_keys
from kvota.model.template import ChatTemplate
from kvota.model.tokenizer import Tokenizer
from kvota.wire.messages import template_messages
from kvota.wire.openai import ChatRequest


class PromptTokenizer:
    """Implements `gateway.upstream.counting.ChatTokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError for a chat template that does not compile."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer.chat_template,
            tool_source=tokenizer.tool_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )

    def count_text(self, text: str) -> int:
        """Raises InvalidRequest for what is no Unicode."""
        return len(self._tokenizer.encode(text))

    def count_chat(self, chat: Mapping[str, Any]) -> int:
        """Raises InvalidRequest where the template refuses the messages, or there is none."""
        asked = msgspec.convert(chat, ChatRequest)
        rendered = self._template.render(
            template_messages(asked.messages),
            tools=chat.get("tools"),
            add_generation_prompt=asked.add_generation_prompt is not False,
            extra=chat.get("chat_template_kwargs"),
        )
        return len(self._tokenizer.encode(rendered, add_special_tokens=False))


def open_tokenizer(path: str) -> PromptTokenizer:
    """Raises ConfigError that says what is wrong with it."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return PromptTokenizer(Tokenizer.from_directory(place))
        return PromptTokenizer(Tokenizer.from_gguf_metadata(read_keys(place)))
    except (StartupError, OSError) as error:
        raise ConfigError(f"No tokenizer can be read from {path}: {error}") from error

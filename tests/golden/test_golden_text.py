"""Our tokenizer and chat templates against Hugging Face's, by way of scripts/golden.py."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvota.formats.gguf_header import read_header
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, fetch
from kvota.model.template import ChatTemplate
from kvota.model.tokenizer import Tokenizer

GOLDEN: Mapping[str, Any] = json.loads(
    (Path(__file__).parent / "smollm2_135m.json").read_text(encoding="utf-8")
)
# This template does not know tools: Hugging Face drops them, kvota says them in words.
CHATS = [chat for chat in GOLDEN["chat"] if "tools" not in chat]


def rendered(template: str, case: Mapping[str, Any]) -> str:
    known = ("name", "messages", "tools", "add_generation_prompt", "chat_template", "text", "ids")
    return ChatTemplate(template, bos_token="<|im_start|>", eos_token="<|im_end|>").render(
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case["add_generation_prompt"],
        extra={name: value for name, value in case.items() if name not in known},
    )


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: str(chat["name"]))
def test_the_models_own_template_gives_hugging_faces_text(chat: Mapping[str, Any]) -> None:
    assert rendered(GOLDEN["chat_template"], chat) == chat["text"]


@pytest.mark.parametrize("case", GOLDEN["templates"], ids=lambda case: str(case["name"]))
def test_every_extension_of_templates_gives_hugging_faces_text(case: Mapping[str, Any]) -> None:
    assert rendered(case["chat_template"], case) == case["text"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = fetch(DEFAULT_MODEL, cache_dir_of(os.environ))
    return Tokenizer.from_gguf_metadata(read_header(path).metadata)


@pytest.mark.model
def test_the_template_and_the_end_token_are_those_of_the_file(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template == GOLDEN["chat_template"]
    assert 2 in tokenizer.eos_ids


@pytest.mark.model
def test_texts_become_hugging_faces_ids(tokenizer: Tokenizer) -> None:
    texts = [*GOLDEN["tokenizer"], *GOLDEN["chat"]]
    ids = [tokenizer.encode(entry["text"], add_special_tokens=False) for entry in texts]
    assert ids == [entry["ids"] for entry in texts]


@pytest.mark.model
def test_ids_become_hugging_faces_text(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode(case["output_ids"]) for case in GOLDEN["cases"]]
    assert texts == [case["output_text"] for case in GOLDEN["cases"]]

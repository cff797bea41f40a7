"""Prompts counted with the files of the model, without the model."""

import json
import sys
from pathlib import Path
from random import Random
from subprocess import run
from typing import Any

import jinja2
import pytest
import tokenizers

from kvota.core.clock import SystemClock
from kvota.core.errors import ConfigError
from kvota.gateway.backends import Registry
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.counting import PromptCount, TokenizerCounter, estimate
from kvota.prompt_tokenizer import open_tokenizer
from kvota.telemetry.log import new_log
from tests.support.tiny_models import tiny_architecture, write_safetensors

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two 三"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_safetensors(folder, architecture=tiny_architecture("llama"))
    return folder


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


async def test_a_count_is_what_the_files_themselves_say(model: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    names = {name: config.get(name) or "" for name in ("bos_token", "eos_token")}
    rendered = template.render(messages=CHAT, add_generation_prompt=True, **names)
    expected = len(reference.encode(rendered, add_special_tokens=False).ids)
    counter = TokenizerCounter(open_tokenizer(str(model)))
    assert await counter.count(body(messages=CHAT)) == PromptCount(expected, is_exact=True)
    texts = ["one two", "三"]
    expected = sum(len(reference.encode(one).ids) for one in texts)
    assert await counter.count(body(prompt=texts)) == PromptCount(expected, is_exact=True)
    long = "one two 三 " * 5_000
    expected = len(reference.encode(long).ids)
    assert (await counter.count(body(prompt=long))).tokens == expected


async def test_what_the_template_refuses_is_guessed(model: Path) -> None:
    counter = TokenizerCounter(open_tokenizer(str(model)))
    refused = body(messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    assert await counter.count(refused) == PromptCount(estimate(refused), is_exact=False)


async def test_replicas_share_the_tokenizer_that_their_settings_name(model: Path) -> None:
    opened: list[str] = []

    def opening(path: str) -> Any:
        opened.append(path)
        return open_tokenizer(path)

    registry = Registry(SystemClock(), Random(1), new_log(sys.stderr), open_tokenizer=opening)
    entries = [
        BackendEntry(name=name, url="http://127.0.0.1:9", tokenizer=str(model)) for name in "ab"
    ]
    built = registry.build([*entries, BackendEntry(name="c", url="http://127.0.0.1:9")])
    assert opened == [str(model)]
    assert (await built["b"].counter("m").count(body(messages=CHAT))).is_exact
    assert [built[name].estimate_max_tokens for name in "ab"] == [0, 0]
    assert not (await built["c"].counter("m").count(body(messages=CHAT))).is_exact


@pytest.mark.parametrize("name", ["nothing-here", "empty", "broken.gguf"])
def test_a_path_without_a_tokenizer_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=name):
        open_tokenizer(str(tmp_path / name))


def test_it_needs_no_openvino() -> None:
    code = "import sys, kvota.prompt_tokenizer; sys.exit('openvino' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0

"""Chat templates are somebody's programs: what they refuse is told, what they break is held in."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import CHAT
from tests.support.live_node import LiveNode, live_node, staged_model
from tests.support.tiny_models import write_safetensors

STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('No system messages here.') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}{{ m.content }}{% endfor %}"
)
ENDLESS = (
    "{% if 'loop' in messages[0].content %}"
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
WITH_BOS = "{{ bos_token }}{{ messages[0].content }}"
BOS_ID = 0


def talk(node: LiveNode, *roles: str, text: str = "hi") -> Any:
    messages = [{"role": role, "content": text} for role in roles]
    return node.post(CHAT, {"model": node.model, "messages": messages, "max_tokens": 2})


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("system", "user"), "No system messages here."),
        (("user", "user"), "Roles must alternate."),
        (("assistant", "user"), "Roles must alternate."),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(roles: tuple[str, ...], words: str) -> None:
    """J05"""
    with live_node(served=staged_model(template=STRICT)) as node:
        reply = talk(node, *roles)
        assert reply.status == 400
        assert words in reply.error["message"]
        assert reply.error["param"] == "messages"
        assert talk(node, "user").status == 200


def test_a_template_without_end_stops_nobody_else() -> None:
    """J05"""
    with live_node(served=staged_model(template=ENDLESS)) as node, ThreadPoolExecutor() as pool:
        stuck = [pool.submit(talk, node, "user", text="loop") for _ in range(3)]
        assert node.complete("x", max_tokens=2).status == 200
        for future in stuck:
            reply = future.result()
            assert reply.status == 400
            assert "template" in reply.error["message"]
        assert talk(node, "user").status == 200


@pytest.mark.parametrize("attack", ["''.__class__.__mro__", "messages.__class__.__init__"])
def test_a_template_cannot_reach_out_of_its_sandbox(attack: str) -> None:
    """J05"""
    with live_node(served=staged_model(template="{{ " + attack + " }}")) as node:
        reply = talk(node, "user")
        assert reply.status == 400
        assert "<class" not in reply.error["message"]


def test_without_a_template_chat_is_refused_and_completions_work() -> None:
    """J05"""
    with live_node(served=staged_model(template=None)) as node:
        assert talk(node, "user").error["param"] == "messages"
        assert node.complete("x", max_tokens=2).status == 200


def test_a_template_that_does_not_compile_ends_the_start(tmp_path: Path) -> None:
    """J05"""
    folder = write_safetensors(tmp_path / "broken").path
    config = folder / "tokenizer_config.json"
    broken = {**json.loads(config.read_text()), "chat_template": "{% for m in %}"}
    config.write_text(json.dumps(broken))
    ended = subprocess.run(
        [sys.executable, "-m", "kvota", "serve", str(folder), "--port", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "template" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_bos_comes_once_whoever_writes_it() -> None:
    """J04"""
    served = staged_model(template=WITH_BOS, bos_id=BOS_ID)
    with live_node(served=served) as node:
        body = {"model": node.model, "messages": [{"role": "user", "content": "hi"}]}
        reply = node.post(CHAT, {**body, "max_tokens": 1, "return_token_ids": True})
        assert reply.json["prompt_token_ids"].count(BOS_ID) == 1
        assert reply.usage["prompt_tokens"] == 3
        for prompt in ("hi", "<|endoftext|>hi"):
            completion = node.complete(prompt, max_tokens=1, return_token_ids=True)
            ids = completion.json["choices"][0]["prompt_token_ids"]
            assert ids.count(BOS_ID) == 1
            assert ids[0] == BOS_ID

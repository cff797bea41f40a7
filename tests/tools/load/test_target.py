"""What a server is found to be: ours, vLLM's like, strict ones, ones that only chat."""

from collections.abc import Awaitable, Callable
from random import Random

import pytest

from kvota.tools.load.prompts import Estimated, TokenIds, Words
from kvota.tools.load.target import find_target
from kvota.tools.server import ServerUnusable
from tests.support.fake_backend import FakeBackend, Received, Wire, fails, num_words, streams
from tests.support.live_node import LiveNode

TINY_TOKENS = 40


def strict(*unknown: str) -> Callable[[Received, Wire], Awaitable[None]]:
    """A server that refuses fields it does not know, and counts words."""

    async def script(asked: Received, wire: Wire) -> None:
        wanted = asked.json
        bad = [name for name in unknown if name in wanted]
        if bad:
            await fails(400)(asked, wire)
            return
        usage = "end" if "stream_options" in wanted else None
        text = wanted["messages"][0]["content"] if "messages" in wanted else wanted["prompt"]
        num = wanted["max_tokens"]
        await streams(num, usage=usage, prompt_tokens=num_words(str(text)) + 7)(asked, wire)

    return script


async def test_our_own_node_takes_ids_and_is_counted_exactly() -> None:
    node = LiveNode()
    try:
        target = await find_target(node.url, None)
    finally:
        node.stop()
    assert (target.model, target.is_chat, target.is_forced, target.has_usage) == (
        "tiny", False, True, True,
    )  # fmt: skip
    assert isinstance(target.prompts, TokenIds)
    assert len(target.prompts.make(TINY_TOKENS, Random(1))) == TINY_TOKENS
    assert target.max_model_len == 1024
    with pytest.raises(ServerUnusable, match="whose window is 1024"):
        target.check_length(1000, 100)


async def test_a_server_that_counts_for_us_gets_words() -> None:
    async with FakeBackend() as backend:
        backend.script = strict()
        target = await find_target(backend.url + "/v1", None)
    assert isinstance(target.prompts, Words)
    assert num_words(str(target.prompts.make(50, Random(1)))) == 50


@pytest.mark.parametrize(
    ("unknown", "forced", "usage"),
    [
        ((), True, True),
        (("ignore_eos",), False, True),
        (("min_tokens", "stream_options"), False, False),
        (("stream_options",), True, False),
    ],
)
async def test_a_strict_server_is_asked_only_what_it_knows(
    unknown: tuple[str, ...], forced: bool, usage: bool
) -> None:
    async with FakeBackend() as backend:
        backend.script = strict(*unknown)
        target = await find_target(backend.url, None)
    assert (target.is_forced, target.has_usage, target.is_chat) == (forced, usage, False)


async def test_a_server_without_a_tokenizer_gets_an_estimate() -> None:
    async with FakeBackend() as backend:
        backend.overrides["/tokenize"] = fails(404)
        backend.script = strict()
        target = await find_target(backend.url, None)
    assert isinstance(target.prompts, Estimated)
    assert (target.prompts.tokens_per_word, target.prompts.overhead) == (1.0, 7.0)
    assert "estimated" in target.facts["prompt lengths"]


async def test_a_server_that_only_chats_is_chatted_with() -> None:
    async with FakeBackend() as backend:
        answer = strict()

        async def only_chat(asked: Received, wire: Wire) -> None:
            await (answer if "chat" in asked.path else fails(404))(asked, wire)

        backend.script = only_chat
        target = await find_target(backend.url, None)
        assert target.is_chat
        bodies = [one.json for one in backend.generations if "chat" in one.path]
    assert all("prompt" not in body for body in bodies)
    assert isinstance(target.prompts, Words)


async def test_what_cannot_be_used_is_said() -> None:
    async with FakeBackend() as backend:
        backend.script = fails(401)
        with pytest.raises(ServerUnusable, match="answered 401 y"):
            await find_target(backend.url, "secret-key")
        with pytest.raises(ServerUnusable, match="no model other; it has fake-model"):
            await find_target(backend.url, None, model="other")
        url = backend.url
    with pytest.raises(ServerUnusable, match="Is the server running there"):
        await find_target(url, None)

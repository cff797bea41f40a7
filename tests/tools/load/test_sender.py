"""The sender on real sockets: what it sends, and what it makes of good and of bad servers."""

import pytest

from kvota.tools.load.asked import UNFINISHED, Asked, Seen
from kvota.tools.load.sender import Sender
from tests.support.fake_backend import (
    FakeBackend,
    Script,
    fails,
    hangs_up,
    never_answers,
    never_ends,
    says,
)

ASKED = Asked(prompt="one two", max_tokens=8, prompt_tokens=2, lane="short")


async def sent(script: Script | None, *, timeout_s: float = 60.0, is_chat: bool = False) -> Seen:
    async with FakeBackend(num_tokens=8) as backend:
        backend.script = script
        sender = Sender(backend.url, model="m", timeout_s=timeout_s, is_chat=is_chat)
        async with sender:
            return await sender.send(ASKED)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_good_answer_is_timed_token_by_token(is_chat: bool) -> None:
    one = await sent(None, is_chat=is_chat)
    assert one.is_whole
    assert (one.output_tokens, one.max_tokens, len(one.token_s)) == (8, 8, 8)
    assert (one.lane, one.asked_prompt_tokens, one.prompt_tokens) == ("short", 2, 5)
    assert one.first_token_s is not None
    assert 0 <= one.sent_s <= one.first_token_s <= one.token_s[-1] <= one.ended_s


async def test_what_is_sent_forces_the_length_and_asks_for_usage() -> None:
    async with FakeBackend() as backend:
        async with Sender(backend.url + "/v1/", "the-key", model="m") as sender:
            await sender.send(Asked(prompt=[5, 6, 7], max_tokens=3))
        [asked] = backend.received
    assert asked.path == "/v1/completions"
    assert asked.headers["authorization"] == "Bearer the-key"
    assert asked.json == {
        "model": "m", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "min_tokens": 3,
    }  # fmt: skip


async def test_connections_are_used_again() -> None:
    async with FakeBackend() as backend:
        async with Sender(backend.url, model="m") as sender:
            for _ in range(5):
                assert (await sender.send(ASKED)).is_whole
        assert [one.number for one in backend.received] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (fails(503, headers={"retry-after": "3"}), 503, "y"),
        (fails(400), 400, "y"),
        (hangs_up, None, "connection"),
        (says(b'data: {"choices":[{"text":"a"}]}\n\n', is_complete=False), 200, "connection"),
        (says(b'data: {"choices":[{"text":"a"}]}\n\n'), 200, "broken_stream"),
    ],
)
async def test_a_bad_answer_has_its_code(script: Script, status: int | None, code: str) -> None:
    one = await sent(script)
    assert (one.status, one.code) == (status, code)
    assert one.is_refused is (status == 503)
    assert one.retry_after_s == (3.0 if status == 503 else None)


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with FakeBackend() as backend:
        url = backend.url
    async with Sender(url, model="m") as sender:
        one = await sender.send(ASKED)
    assert (one.status, one.code) == (None, "connection")


@pytest.mark.parametrize("script", [never_answers, never_ends])
async def test_an_answer_without_an_end_is_given_up(script: Script) -> None:
    assert (await sent(script, timeout_s=0.2)).code == "client_timeout"


async def test_when_the_run_is_over_what_was_seen_is_kept() -> None:
    async with FakeBackend() as backend:
        backend.script = never_ends
        async with Sender(backend.url, model="m") as sender:
            now_s = sender._clock.now()
            one = await sender.send(ASKED, origin_s=now_s, until_s=now_s + 1.0)
            assert one.code == UNFINISHED
            assert one.output_tokens == len(one.token_s) > 0
        await backend.generations[0].is_gone.wait()

"""How long prompts are: by a tokenizer, by the backend, and by a guess with a stated error."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.clock import SystemClock
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.counting import (
    QUESTIONS_MAX,
    TOKENS_PER_CHAT,
    TOKENS_PER_MESSAGE,
    BackendCounter,
    EstimatingCounter,
    PromptCount,
    TokenizerCounter,
    estimate,
)
from kvota.gateway.upstream.estimate import estimated_tokens
from kvota.gateway.upstream.kinds import TokenizeForm
from tests.support import fake_backend as fake
from tests.support.fake_backend import FakeBackend

CLOCK = SystemClock()
TEXT = Path(__file__).parents[3] / "bench" / "text.txt"

# True counts of the paragraphs of bench/text.txt, and of all of it, by four vocabularies, computed
# with tiktoken 0.14: Llama 3 (llama-models 0.3.0), Qwen (dashscope 2.0.2), cl100k (litellm
# 1.110.2), tekken 240911 (mistral-common 1.13.1).
PARAGRAPHS = (
    (131, 131, 131, 132),  # English
    (133, 133, 133, 133),
    (77, 77, 77, 78),
    (66, 66, 66, 65),
    (89, 82, 118, 94),  # classical Chinese
    (76, 76, 76, 77),  # Python
    (19, 19, 19, 19),
    (13, 13, 13, 13),
    (27, 27, 27, 28),
)
WHOLE = (631, 624, 660, 639)
# The same for texts of other kinds.
OTHERS = {
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива "
    "по-своему. Всё смешалось в доме Облонских.": (39, 51, 67, 40),
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした"
    "所でニャーニャー泣いていた事だけは記憶している。": (54, 54, 78, 56),
    "나는 오늘 아침 일찍 일어나서 공원에 산책을 갔다. 날씨가 매우 좋았고 사람들이 많이 있었다.":
        (29, 34, 56, 22),
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu "
    "einem ungeheueren Ungeziefer verwandelt.": (40, 41, 41, 36),
    "大语言模型的推理服务需要大量显存来保存键值缓存。当并发请求数量增加时，显存会很快耗尽，因此必须"
    "对请求进行调度，并在必要时拒绝。今天天气很好，我们去公园散步吧。": (61, 55, 87, 73),
    "SELECT u.name, COUNT(*) AS n FROM users u JOIN orders o ON o.user_id = u.id WHERE "
    "o.created_at >= '2024-01-01' GROUP BY u.name HAVING COUNT(*) > 5 ORDER BY n DESC LIMIT 10;":
        (53, 58, 53, 59),
    '{"id": "a1b2c3", "items": [{"name": "x", "qty": 3, "price": 19.99}, {"name": "y", "qty": 12, '
    '"price": 0.5}], "ok": true, "nested": {"a": [1, 2, 3, 4, 5]}}': (81, 84, 81, 87),
    "https://www.example.com/path/to/resource?query=abc123&session=9f8e7d6c5b4a#frag-42":
        (32, 35, 32, 36),
    "3141592653589793238462643383279502884197169399375105820974944592": (22, 64, 22, 64),
}  # fmt: skip


@pytest.mark.parametrize("index", range(len(PARAGRAPHS)))
def test_english_chinese_and_code_are_never_far_too_low_nor_wild(index: int) -> None:
    paragraphs = [one for one in TEXT.read_text().split("\n\n") if one.strip()]
    guess = estimated_tokens(paragraphs[index].encode())
    assert 0.99 * max(PARAGRAPHS[index]) <= guess <= 1.5 * min(PARAGRAPHS[index])


def test_a_mixed_text_is_a_little_over() -> None:
    guess = estimated_tokens(TEXT.read_bytes())
    assert max(WHOLE) <= guess <= 1.11 * min(WHOLE)


@pytest.mark.parametrize("text", OTHERS)
def test_other_languages_and_formats_keep_the_stated_bound(text: str) -> None:
    guess = estimated_tokens(text.encode())
    assert 0.78 * max(OTHERS[text]) <= guess <= 1.5 * max(OTHERS[text])


@given(st.text(max_size=100), st.text(max_size=100))
def test_a_guess_grows_with_the_text(one: str, other: str) -> None:
    parts = estimated_tokens(one.encode()) + estimated_tokens(other.encode())
    assert abs(estimated_tokens((one + other).encode()) - parts) <= 2
    assert estimated_tokens((one + "x").encode()) >= 1


# --- bodies


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_chat_is_its_texts_and_what_the_template_adds() -> None:
    def chat(num_messages: int, num_words: int) -> int:
        texts = estimated_tokens(num_words * b"hello")
        return TOKENS_PER_CHAT + num_messages * TOKENS_PER_MESSAGE + texts

    assert estimate(body(messages=[user("hello")])) == chat(1, 1)
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "hello"}]
    assert estimate(body(messages=[user(parts)])) == chat(1, 2)
    call = {"id": "c", "type": "function", "function": {"name": "hello", "arguments": "hello"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert estimate(body(messages=[user("hello"), said])) == chat(2, 3)


def test_tools_count_as_they_are_written() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    plain = estimate(body(messages=[user("x")]))
    assert estimate(body(messages=[user("x")], tools=None)) == plain
    assert estimate(body(messages=[user("x")], tools=[tool])) > plain + 15


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4]], 4),
        ([[1], "hello"], 1 + 1 + estimated_tokens(b"hello")),
        ("hello", 1 + estimated_tokens(b"hello")),
        (["hello", "hello"], 2 + 2 * estimated_tokens(b"hello")),
        ([], 0),
        (None, 0),
    ],
)
def test_every_form_of_prompt_is_counted(prompt: Any, tokens: int) -> None:
    assert estimate(body(prompt=prompt)) == tokens


async def test_nothing_is_free() -> None:
    assert await EstimatingCounter().count(body(prompt="")) == PromptCount(1, is_exact=False)


# --- by a tokenizer


class Words:
    """A token is a word; a message is a word more."""

    def count_text(self, text: str) -> int:
        return len(text.split())

    def count_chat(self, chat: Mapping[str, Any]) -> int:
        return sum(1 + len(one["content"].split()) for one in chat["messages"])


async def test_a_tokenizer_counts_exactly() -> None:
    counter = TokenizerCounter(Words())
    chat = await counter.count(body(messages=[user("one two"), user("three")]))
    assert chat == PromptCount(5, is_exact=True)
    plain = await counter.count(body(prompt=["one two", "three"]))
    assert plain == PromptCount(3, is_exact=True)
    assert (await counter.count(body(prompt=[7, 8]))).tokens == 2


# --- by the backend


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as backend:
        yield backend


@pytest.fixture
async def upstream(backend: FakeBackend) -> AsyncIterator[Upstream]:
    upstream = Upstream(UpstreamSettings(name="b", url=backend.url), CLOCK)
    yield upstream
    await upstream.close()


async def test_vllm_counts_with_everything_that_shapes_the_template(
    backend: FakeBackend, upstream: Upstream
) -> None:
    counter = BackendCounter(upstream, TokenizeForm.VLLM, model="real")
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = body(messages=[user("one two three")], tools=tools, temperature=0.3, max_tokens=5)
    assert await counter.count(asked) == PromptCount(5, is_exact=True)
    assert backend.received[0].path == "/tokenize"
    assert backend.received[0].json == {
        "model": "real",
        "messages": [user("one two three")],
        "tools": tools,
    }
    assert (await counter.count(body(prompt=["one two", "three"]))).tokens == 3
    assert (await counter.count(body(prompt=[[1, 2], [3]]))).tokens == 3


async def test_llamacpp_fills_the_template_first(backend: FakeBackend, upstream: Upstream) -> None:
    async def template(asked: fake.Received, wire: fake.Wire) -> None:
        texts = [one["content"] for one in asked.json["messages"]]
        await wire.json({"prompt": f"<s> {' '.join(texts)} </s>"})

    backend.overrides["/apply-template"] = template
    counter = BackendCounter(upstream, TokenizeForm.LLAMACPP, model="real")
    assert await counter.count(body(messages=[user("one two")])) == PromptCount(4, is_exact=True)
    assert (await counter.count(body(prompt="one two three"))).tokens == 3


async def test_tgi_counts_chats_with_their_template(
    backend: FakeBackend, upstream: Upstream
) -> None:
    tokens = [{"id": number, "text": "x", "start": 0, "stop": 1} for number in range(7)]
    seen: list[Any] = []

    async def texts(asked: fake.Received, wire: fake.Wire) -> None:
        seen.append(asked.json)
        await wire.json(tokens[:3])

    async def chats(asked: fake.Received, wire: fake.Wire) -> None:
        seen.append(asked.json)
        await wire.json({"tokenize_response": tokens, "templated_text": "<s>"})

    backend.overrides.update({"/tokenize": texts, "/chat_tokenize": chats})
    counter = BackendCounter(upstream, TokenizeForm.TGI, model="real")
    assert await counter.count(body(messages=[user("one")])) == PromptCount(7, is_exact=True)
    assert await counter.count(body(prompt=["a b c", "d"])) == PromptCount(6, is_exact=True)
    assert seen == [{"messages": [user("one")]}, {"inputs": "a b c"}, {"inputs": "d"}]


@pytest.mark.parametrize("form", list(TokenizeForm))
@pytest.mark.parametrize(
    "script",
    [fake.fails(500), fake.fails(400), fake.hangs_up, fake.never_answers, fake.says(b"[]"),
     fake.says(b'{"count": "many", "tokens": 5, "prompt": null}')],
)  # fmt: skip
async def test_a_backend_that_cannot_count_is_replaced_by_a_guess(
    backend: FakeBackend, upstream: Upstream, form: TokenizeForm, script: fake.Script
) -> None:
    paths = ("/tokenize", "/apply-template", "/chat_tokenize")
    backend.overrides.update(dict.fromkeys(paths, script))
    counter = BackendCounter(upstream, form, model="real", timeout_s=0.2)
    asked = body(messages=[user("one two three")])
    assert await counter.count(asked) == PromptCount(estimate(asked), is_exact=False)


async def test_all_prompts_together_have_one_bound_of_time(
    backend: FakeBackend, upstream: Upstream
) -> None:
    async def slowly(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.pause(0.15)
        await wire.json({"count": 1})

    backend.overrides["/tokenize"] = slowly
    counter = BackendCounter(upstream, TokenizeForm.VLLM, model="real", timeout_s=0.2)
    asked = body(prompt=["one", "two", "three", "four", "five"])
    assert await counter.count(asked) == PromptCount(estimate(asked), is_exact=False)
    assert len(backend.received) <= 2, "and nothing after it"


@pytest.mark.parametrize("form", list(TokenizeForm))
async def test_a_backend_is_asked_about_so_many_texts_and_no_more(
    backend: FakeBackend, upstream: Upstream, form: TokenizeForm
) -> None:
    counter = BackendCounter(upstream, form, model="real")
    asked = body(prompt=(QUESTIONS_MAX + 1) * ["one two"])
    assert await counter.count(asked) == PromptCount(estimate(asked), is_exact=False)
    assert not backend.received
    await counter.count(body(prompt=[*QUESTIONS_MAX * ["one"], [1, 2]]))
    assert backend.received

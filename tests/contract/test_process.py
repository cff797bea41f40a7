"""`kvota serve` on real kernels: the same text whoever else is there, and memory that stays."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import COMPLETIONS, Reply
from tests.support.raw_http import RawConnection, post_bytes
from tests.support.serve_process import ServeProcess, serve_process

GREEDY: Mapping[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED: Mapping[str, Any] = {**GREEDY, "temperature": 0.8, "seed": 42}
MEGABYTE = 10**6


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    """Token ids that no other number shares a beginning with."""
    digest = hashlib.shake_128(str(number).encode()).digest(num_tokens)
    return [3 + byte for byte in digest]


def ids_of(reply: Reply) -> list[list[int]]:
    assert reply.status == 200, reply.content
    return [choice["token_ids"] for choice in reply.json["choices"]]


def tokens(process: ServeProcess, given: Any, **fields: Any) -> list[list[int]]:
    """The token ids of every choice: text could hide a difference."""
    return ids_of(process.complete(given, return_token_ids=True, **fields))


@pytest.mark.parametrize("how", [GREEDY, SAMPLED])
def test_a_request_says_the_same_alone_and_beside_sixteen_others(
    process: ServeProcess, how: dict[str, Any]
) -> None:
    """A17, D02"""
    prompts = [prompt(i, 10 + 5 * i) for i in range(17)]
    alone = [tokens(process, given, **how, use_prefix_cache=False) for given in prompts]
    with ThreadPoolExecutor(17) as pool:
        for _ in range(2):
            together = pool.map(lambda given: tokens(process, given, **how), prompts)
            assert list(together) == alone


def test_a_seeded_request_is_the_same_whatever_its_neighbours_draw(process: ServeProcess) -> None:
    """A17"""
    alone = tokens(process, prompt(1), **SAMPLED)
    triple = tokens(process, prompt(1), **SAMPLED, n=3)
    assert len({tuple(choice) for choice in triple}) > 1
    neighbours: list[dict[str, Any]] = [{}, {"seed": 7}, {"seed": 42, "temperature": 1.5}]
    for extra in neighbours:
        fields = {**SAMPLED, "seed": None, "max_tokens": 60, **extra}
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(tokens, process, prompt(2), **fields)
            assert tokens(process, prompt(1), **SAMPLED) == alone
            assert tokens(process, prompt(1), **SAMPLED, n=3) == triple
            beside.result()


@pytest.mark.parametrize("how", [GREEDY, SAMPLED])
def test_a_stream_says_what_the_body_says(process: ServeProcess, how: dict[str, Any]) -> None:
    """A01, A02: a random model writes many half characters"""
    for number in range(5):
        body = process.complete(prompt(number), **how)
        stream = process.complete(prompt(number), **how, stream=True)
        assert stream.text() == body.text()
        assert stream.finish() == body.finish()


def test_reused_kv_changes_no_token(process: ServeProcess) -> None:
    """D02, D06: the same prompt, a longer one, and one prefix under eight questions"""
    shared = prompt(100, 96)
    questions = [shared + prompt(200 + i, 10) for i in range(8)]
    fresh = [tokens(process, q, **GREEDY, use_prefix_cache=False) for q in questions]
    cold = process.complete(questions[0], **GREEDY, return_token_ids=True)
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
    for _ in range(2):
        again = process.complete(questions[0], **GREEDY, return_token_ids=True)
        assert ids_of(cold) == ids_of(again) == fresh[0]
        assert again.usage["prompt_tokens_details"]["cached_tokens"] >= 64
        assert int(again.headers["x-kvota-cached-tokens"]) >= 64
    assert [tokens(process, q, **GREEDY) for q in questions] == fresh
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda q: tokens(process, q, **GREEDY), questions)) == fresh


def test_echoed_logprobs_are_the_same_when_the_prompt_is_cached(process: ServeProcess) -> None:
    """D07, A05"""
    fields = {"echo": True, "logprobs": 2, "max_tokens": 0}
    first, second = (process.complete(prompt(300, 50), **fields).json for _ in range(2))
    values = [reply["choices"][0]["logprobs"]["token_logprobs"] for reply in (first, second)]
    assert values[0][0] is None
    assert len(values[0]) == 50
    assert values[0][1:] == pytest.approx(values[1][1:], abs=1e-3)


def test_preempted_requests_say_what_they_say_undisturbed(
    process: ServeProcess, long_model: Path
) -> None:
    """D03, D05: KV for about two and a half of eight requests"""
    how = {**SAMPLED, "max_tokens": 120, "logprobs": 1}
    prompts = [prompt(400 + i) for i in range(8)]
    alone = [tokens(process, given, **how) for given in prompts]
    with serve_process(long_model, *_little_memory()) as narrow, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda given: tokens(narrow, given, **how), prompts))
        assert together == alone
        assert narrow.metric("kvota_preemptions_total") > 0
        narrow.wait_idle()


def _little_memory() -> tuple[str, ...]:
    # The forecast would admit no more than what fits.
    return ("--kv-memory", "128KiB", "--max-model-len", "256", "--admission", "optimistic")


def test_memory_stays_under_weights_kv_and_a_reserve(process: ServeProcess) -> None:
    """Contract of the start-up bill; B01: refused and abandoned requests leave nothing."""
    rss = "process_resident_memory_bytes"
    _burst(process)
    warm = process.metric(rss)
    for _ in range(3):
        _burst(process)
    process.wait_idle()
    assert process.metric(rss) < warm + 40 * MEGABYTE
    kv_bytes = 32 * 2**20
    at_start = warm  # weights of a tiny model are lost in the runtime's own size
    assert at_start < 500 * MEGABYTE + kv_bytes
    assert process.metric("kvota_kv_blocks_held_after_abort") == 0


def _burst(process: ServeProcess) -> None:
    """Long prompts, refusals, and connections that are cut."""
    port = int(process.url.rpartition(":")[2])
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: process.complete(prompt(i, 200), max_tokens=8), range(64)))
    for i in range(300):
        assert process.complete([1] * 20_000 if i % 100 == 0 else []).status == 400
        with RawConnection(port) as raw:
            body = {"model": process.model, "prompt": prompt(i), "max_tokens": 500}
            raw.send(post_bytes(COMPLETIONS, {**body, "stream": True})[: 60 + i])

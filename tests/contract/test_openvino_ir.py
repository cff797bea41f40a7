"""`kvota serve DIRECTORY` with an OpenVINO export, from the files to the answer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.serve_process import ServeProcess, serve_process
from tests.support.tiny_ir import CONTEXT, EXPORTS, ORACLE, write_ir

TOKENS: list[int] = ORACLE["tokens"]
TOLERANCE = 2e-4  # of log probabilities, KV in float32
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module", params=EXPORTS)
def export(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(export: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = write_ir(tmp_path_factory.mktemp("models") / export, export)
    with serve_process(folder, "--kv-memory", "16MiB", "--kv-cache-dtype", "f32") as process:
        yield process


def hugging_faces(export: str) -> dict[int, npt.NDArray[np.float64]]:
    """Log probabilities after the positions that the oracle has."""
    logits = np.array(ORACLE["logits"][export], np.float64)
    totals = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return dict(zip(ORACLE["rows"], logits - totals, strict=True))


def test_its_log_probabilities_and_ranks_are_hugging_faces(
    served: ServeProcess, export: str
) -> None:
    body = served.complete(TOKENS, max_tokens=1, prompt_logprobs=0).json
    entries = body["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(TOKENS)
    for row, expected in hugging_faces(export).items():
        if row + 1 == len(TOKENS):
            continue
        token = TOKENS[row + 1]
        [(key, entry)] = entries[row + 1].items()
        assert key == str(token)
        assert entry["logprob"] == pytest.approx(expected[token], abs=TOLERANCE)
        surely_ahead = (expected > expected[token] + TOLERANCE).sum()
        perhaps_ahead_and_itself = (expected > expected[token] - TOLERANCE).sum()
        assert surely_ahead < entry["rank"] <= perhaps_ahead_and_itself


def test_its_most_likely_token_is_hugging_faces(served: ServeProcess, export: str) -> None:
    for row, expected in hugging_faces(export).items():
        reply = served.complete(TOKENS[: row + 1], **GREEDY | {"max_tokens": 1, "ignore_eos": True})
        [choice] = reply.json["choices"]
        [token] = choice["token_ids"]
        assert expected[token] == pytest.approx(expected.max(), abs=TOLERANCE)


def test_chat_goes_through_its_template_and_streams_what_the_body_says(
    served: ServeProcess,
) -> None:
    body = served.chat("hello", **GREEDY)
    assert body.status == 200
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokenized = served.post("/tokenize", {"model": served.model, "prompt": prompt}).json
    assert body.json["prompt_token_ids"] == tokenized["tokens"]
    stream = served.chat("hello", **GREEDY, stream=True)
    assert (stream.text(), stream.finish()) == (body.text(), body.finish())


def test_it_says_the_same_beside_others(served: ServeProcess) -> None:
    prompts = [TOKENS[i : i + 40] for i in range(8)]

    def ids(prompt: list[int]) -> Any:
        return served.complete(prompt, **GREEDY).json["choices"][0]["token_ids"]

    alone = [ids(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ids, prompts)) == alone


def test_a_form_is_kept_to(served: ServeProcess) -> None:
    words = ["maybe", "never"]
    reply = served.chat("well?", structured_outputs={"choice": words}, max_tokens=10)
    assert reply.text() in words


def test_its_context_is_what_the_export_was_made_for(served: ServeProcess) -> None:
    [card] = served.get("/v1/models").json["data"]
    assert card["max_model_len"] == CONTEXT
    reply = served.complete([5] * CONTEXT, max_tokens=1)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert served.complete([5] * (CONTEXT - 1), max_tokens=1).status == 200

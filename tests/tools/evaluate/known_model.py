"""A language model whose every probability is known, behind a fake backend's wire.

A token is a letter, and what follows depends on the letter before it alone, so that the true
perplexity and the true divergence of two such models on a text are plain sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log
from random import Random
from typing import Any

from tests.support.fake_backend import FakeBackend, Received, Wire

LETTERS = "abcdefgh .\n"
START = "^"  # before everything, where the model has such a token
Table = dict[str, list[float]]  # log probabilities of LETTERS after each letter


@dataclass(frozen=True)
class KnownModel:
    """`top_max`: more likeliest tokens are refused, as vLLM and OpenAI do."""

    table: Table
    letters: str = LETTERS  # the order of the ids
    speaks_prompt_logprobs: bool = True
    speaks_echo: bool = True
    has_tokenizer: bool = True
    has_start: bool = False
    tells_token_ids: bool = True
    top_max: int = 20
    num_busy: list[int] = field(default_factory=lambda: [0])  # answers 503 so often

    def logprob(self, before: str, letter: str) -> float:
        return self.table[before][LETTERS.index(letter)]

    def like(self, **changes: Any) -> "KnownModel":
        return replace(self, **changes)

    def perturbed(self, scale: float, seed: int = 7) -> "KnownModel":
        """Every logit moved a little, as by coarser weights."""
        chance = Random(seed)
        moved = {
            before: _normal([value + scale * chance.gauss(0, 1) for value in row])
            for before, row in self.table.items()
        }
        return self.like(table=moved)

    def serve(self, backend: FakeBackend) -> None:
        backend.overrides["/v1/completions"] = self._complete
        backend.overrides["/tokenize"] = self._tokenize

    async def _tokenize(self, asked: Received, wire: Wire) -> None:
        if not self.has_tokenizer:
            await wire.json({"detail": "Not Found"}, 404)
            return
        ids = [self.letters.index(one) for one in self._readable(asked.json["prompt"])]
        if asked.json["add_special_tokens"] and self.has_start:
            ids.insert(0, len(self.letters))
        await wire.json({"tokens": ids, "count": len(ids)})

    async def _complete(self, asked: Received, wire: Wire) -> None:
        wanted = asked.json
        if self.num_busy[0]:
            self.num_busy[0] -= 1
            await wire.json({"error": {"message": "busy"}}, 503, {"Retry-After": "0"})
        elif self._is_refused(wanted):
            await wire.json({"error": {"message": "not known here"}}, 400)
        else:
            await wire.json(self._answer(wanted))

    def _is_refused(self, wanted: dict[str, Any]) -> bool:
        is_unknown = (wanted.get("echo") and not self.speaks_echo) or (
            not self.tells_token_ids and "return_token_ids" in wanted
        )
        most = max(wanted.get("logprobs") or 0, wanted.get("prompt_logprobs") or 0)
        return bool(is_unknown) or most > self.top_max

    def _answer(self, wanted: dict[str, Any]) -> dict[str, Any]:
        prompt = self._letters(wanted["prompt"])
        said = self._greedy(prompt, wanted["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "text": "".join(said), "finish_reason": "length"}
        if wanted.get("return_token_ids"):
            choice["token_ids"] = [self.letters.index(one) for one in said]
            choice["prompt_token_ids"] = [self._id(one) for one in prompt]
        if self.speaks_prompt_logprobs and wanted.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._by_id(prompt, wanted["prompt_logprobs"])
        if wanted.get("logprobs") is not None:
            told = [*prompt, *said] if wanted.get("echo") else said
            choice["logprobs"] = self._by_name(told, wanted["logprobs"])
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def _readable(self, text: str) -> list[str]:
        return [one if one in self.letters else " " for one in text]

    def _letters(self, prompt: str | list[int]) -> list[str]:
        if isinstance(prompt, str):
            return [START] * self.has_start + self._readable(prompt)
        return [(self.letters + START)[one] for one in prompt]

    def _id(self, letter: str) -> int:
        return (self.letters + START).index(letter)

    def _greedy(self, prompt: Sequence[str], num: int) -> list[str]:
        said: list[str] = []
        for _ in range(num):
            row = self.table[[*prompt, *said][-1]]
            said.append(LETTERS[row.index(max(row))])
        return said

    def _top(self, before: str, num: int) -> dict[str, float]:
        row = dict(zip(LETTERS, self.table[before], strict=True))
        return dict(sorted(row.items(), key=lambda item: -item[1])[:num])

    def _by_id(self, prompt: Sequence[str], num: int) -> list[dict[str, Any] | None]:
        entries: list[dict[str, Any] | None] = [None]
        for before, letter in pairwise(prompt):
            top = self._top(before, num) | {letter: self.logprob(before, letter)}
            entries.append(
                {
                    str(self._id(one)): {"logprob": value, "decoded_token": one}
                    for one, value in top.items()
                }
            )
        return entries

    def _by_name(self, told: Sequence[str], num: int) -> dict[str, Any]:
        pairs = list(pairwise(told))
        return {
            "tokens": list(told),
            "token_logprobs": [None, *(self.logprob(*pair) for pair in pairs)],
            "top_logprobs": [None, *(self._top(before, num) for before, _ in pairs)],
        }


def known_model(seed: int = 1) -> KnownModel:
    chance = Random(seed)
    rows = {one: [2 * chance.gauss(0, 1) for _ in LETTERS] for one in LETTERS + START}
    return KnownModel({before: _normal(row) for before, row in rows.items()})


def written_by(model: KnownModel, num: int, seed: int = 3) -> str:
    """A text as the model itself would write it, so that others read it worse."""
    chance = Random(seed)
    text = "a"
    for _ in range(num - 1):
        weights = [exp(value) for value in model.table[text[-1]]]
        text += chance.choices(LETTERS, weights)[0]
    return text


def true_surprise(model: KnownModel, windows: Sequence[str]) -> list[float]:
    """−ln p of every letter that has one before it, window by window."""
    return [-model.logprob(before, letter) for text in windows for before, letter in pairwise(text)]


def true_divergences(p: KnownModel, q: KnownModel, windows: Sequence[str]) -> list[float]:
    """KL(p ‖ q) at each of these places, over the whole vocabulary."""
    return [
        sum(exp(a) * (a - b) for a, b in zip(p.table[before], q.table[before], strict=True))
        for text in windows
        for before in text[:-1]
    ]


def _normal(logits: Sequence[float]) -> list[float]:
    total = log(sum(exp(one) for one in logits))
    return [one - total for one in logits]

"""One version of a model, as it is served: what it can be asked, and asking it.

`open_served` finds out with a few small requests whether text can be tokenized, in which dialect
the server tells the log probabilities of a prompt and of how many likeliest tokens, and whether it
tells the tokens of a continuation. A server that is busy is waited for as long as it says.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kvota.tools.evaluate.answers import (
    Continuation,
    Dialect,
    Scored,
    Unexpected,
    asked_for,
    continuation,
    scored,
)
from kvota.tools.server import (
    ServerUnusable,
    authorization,
    connection_text,
    error_text,
    root_of,
)

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 300.0  # a long window on a slow machine behind a line
BUSY: Final = (429, 503)
ATTEMPTS_MAX: Final = 6
WAIT_S, WAIT_MAX_S = 1.0, 30.0  # where a busy server says nothing, and at most
PROBE: Final = "The quick brown fox jumps over the lazy dog."
NOT_OFFERED: Final = (400, 404, 405, 422, 501)
# What may be asked about a continuation's tokens: the first that the server takes.
TOKEN_FIELDS: Final[tuple[Mapping[str, Any], ...]] = (
    {"return_token_ids": True, "logprobs": 0}, {"logprobs": 1}, {}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a version is served; `model` None is the server's first."""

    url: str
    model: str | None = None
    api_key: str | None = None

    @classmethod
    def parse(cls, text: str, *, url: str, api_key: str | None = None) -> "Place":
        """`URL`, `MODEL@URL`, or a `MODEL` at `url`."""
        if text.startswith(("http://", "https://")):
            return cls(root_of(text), None, api_key)
        model, separator, there = text.partition("@http")
        return cls(root_of(f"http{there}" if separator else url), model, api_key)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers=authorization(self.api_key),
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )


class _NotOffered(Exception):
    """The server does not know this path or field."""


class Served:
    """`dialect` is None where no log probabilities are told; `top` how many likeliest."""

    def __init__(self, client: httpx.AsyncClient, url: str, card: Mapping[str, Any]) -> None:
        self._client = client
        self.url = url
        self.model = str(card["id"])
        length = card.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        self.dialect: Dialect | None = None
        self.top = 0
        self._num_output = 0  # some servers refuse max_tokens 0
        self._token_fields = TOKEN_FIELDS[-1]

    async def tokens(self, text: str, *, special: bool) -> list[int] | None:
        """Token ids, with or without what the model wants around them; None: cannot be told."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        try:
            tokens = (await self._post("/tokenize", body))["tokens"]
        except (_NotOffered, KeyError, TypeError):
            return None
        is_ids = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if is_ids else None

    async def score(self, prompt: Sequence[int] | str) -> Scored:
        """The log probabilities of a prompt's tokens. Raises ServerUnusable."""
        assert self.dialect is not None, "no log probabilities here"
        try:
            return await self._score(prompt, self.dialect, self.top, self._num_output)
        except (_NotOffered, Unexpected) as error:
            raise ServerUnusable(
                f"{self.url} told log probabilities at first and then did not: {error}"
            ) from error

    async def continued(self, prompt: str, max_tokens: int) -> Continuation:
        """The most likely continuation. Raises ServerUnusable."""
        try:
            return continuation(await self._complete(prompt, max_tokens, self._token_fields))
        except (_NotOffered, Unexpected) as error:
            raise ServerUnusable(f"{self.url} gave no continuation: {error}") from error

    async def find_abilities(self, top: int) -> None:
        """Try what the server can be asked, best first. Raises ServerUnusable."""
        await self._find_token_fields()
        ids = await self.tokens(PROBE, special=True)
        for dialect, wanted, num_output in _ways(top):
            try:
                await self._score(ids or PROBE, dialect, wanted, num_output)
            except (_NotOffered, Unexpected):
                continue
            self.dialect, self.top, self._num_output = dialect, wanted, num_output
            return

    async def _find_token_fields(self) -> None:
        reason: Exception | None = None
        for fields in TOKEN_FIELDS:
            try:
                continuation(await self._complete(PROBE, 2, fields))
            except (_NotOffered, Unexpected) as error:
                reason = error
            else:
                self._token_fields = fields
                return
        raise ServerUnusable(f"{self.url} cannot continue a text at /v1/completions: {reason}")

    async def _score(
        self, prompt: Sequence[int] | str, dialect: Dialect, top: int, num_output: int
    ) -> Scored:
        fields = asked_for(dialect, top, num_output)
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        answer = await self._post("/v1/completions", body)
        return scored(answer, dialect, None if isinstance(prompt, str) else prompt)

    async def _complete(
        self, prompt: str, max_tokens: int, fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
        return await self._post("/v1/completions", {**body, **fields})

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                response = await self._client.post(path, json=body)
            except httpx.HTTPError as error:
                raise ServerUnusable(connection_text(self._client.base_url, error)) from error
            if response.status_code not in BUSY or attempt == ATTEMPTS_MAX:
                break
            await asyncio.sleep(_wait_s(response))
        if response.status_code in NOT_OFFERED:
            raise _NotOffered(error_text(response))
        return _object(response)


async def open_served(client: httpx.AsyncClient, place: Place, top: int) -> Served:
    """Ask the server what it serves and can tell. Raises ServerUnusable."""
    served = Served(client, place.url, await _card(client, place.model))
    await served.find_abilities(top)
    return served


async def _card(client: httpx.AsyncClient, model: str | None) -> Mapping[str, Any]:
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerUnusable(connection_text(client.base_url, error)) from error
    try:
        cards: list[Mapping[str, Any]] = list(_object(response)["data"])
        names = [str(card["id"]) for card in cards]
    except (KeyError, TypeError) as error:
        raise ServerUnusable(f"{client.base_url} does not list models like OpenAI.") from error
    for name, card in zip(names, cards, strict=True):
        if model in (None, name):
            return card
    listed = ", ".join(names) or "none"
    raise ServerUnusable(f"{client.base_url} has no model {model or ''}; it has {listed}.")


def _ways(top: int) -> list[tuple[Dialect, int, int]]:
    """Dialect, likeliest tokens, max_tokens: vLLM allows 20 likeliest, OpenAI 5."""
    tops = sorted({top, min(top, 20), min(top, 5), 1}, reverse=True)
    ways = [(Dialect.PROMPT_LOGPROBS, one, 1) for one in tops]
    return ways + [(Dialect.ECHO, one, num_output) for one in tops for num_output in (0, 1)]


def _object(response: httpx.Response) -> Mapping[str, Any]:
    if response.status_code != httpx.codes.OK:
        raise ServerUnusable(error_text(response))
    try:
        answer = response.json()
    except ValueError as error:
        raise ServerUnusable(f"{response.url} answered what is no JSON.") from error
    if not isinstance(answer, dict):
        raise ServerUnusable(f"{response.url} answered what is no JSON object.")
    return answer


def _wait_s(response: httpx.Response) -> float:
    try:
        return min(WAIT_MAX_S, max(0.0, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return WAIT_S

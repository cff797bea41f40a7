"""The server that is to be loaded: what it is, and what it understands.

A few small requests find out: the model's name, whether output lengths can be forced, whether it
tells usage, and how prompts of an exact length are made for it.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import httpx

from kvota.core.clock import Clock
from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.prompts import (
    WORDS,
    Count,
    Prompts,
    TokenIds,
    estimated,
    one_token_words,
)
from kvota.tools.load.sender import Sender
from kvota.tools.server import (
    ServerUnusable,
    authorization,
    connection_text,
    error_text,
    root_of,
)

TIMEOUT_S = 30.0
PROBE_TOKENS = 2
UNKNOWN_FIELD = (400, 422)
KEY_HINT = " Give a key with --api-key or in KVOTA_API_KEY."
FEW, MANY = 20, 120  # words of the two probes for an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One model on one server."""

    url: str
    model: str
    is_chat: bool
    is_forced: bool  # outputs have exactly max_tokens
    has_usage: bool
    prompts: Prompts
    max_model_len: int | None = None
    owned_by: str = ""

    def sender(self, api_key: str | None, clock: Clock | None = None) -> Sender:
        return Sender(
            self.url,
            api_key,
            model=self.model,
            is_chat=self.is_chat,
            is_forced=self.is_forced,
            has_usage=self.has_usage,
            clock=clock,
        )

    def check_length(self, prompt_tokens: int, output_tokens: int) -> None:
        """Raises ServerUnusable when such a request does not fit the model's window."""
        limit = self.max_model_len
        if limit is not None and prompt_tokens + output_tokens > limit:
            raise ServerUnusable(
                f"{prompt_tokens} prompt + {output_tokens} output tokens do not fit {self.model}, "
                f"whose window is {limit}. Choose shorter ones with --prompt and --output."
            )

    @property
    def facts(self) -> dict[str, str]:
        """For a report."""
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        return {
            "server": self.url + path,
            "model": self.model + (f" (by {self.owned_by})" if self.owned_by else ""),
            "prompt lengths": self.prompts.how,
            "output lengths": "forced with ignore_eos and min_tokens"
            if self.is_forced
            else "as the model ends: this server cannot be told",
        }


async def find_target(
    url: str, api_key: str | None, *, model: str | None = None, is_chat: bool = False
) -> Target:
    """Ask the server. Raises ServerUnusable with the reason when it cannot be measured."""
    root = root_of(url)
    async with httpx.AsyncClient(
        base_url=root, headers=authorization(api_key), timeout=TIMEOUT_S, trust_env=False
    ) as client:
        card = await _model_card(client, model)
        name = str(card["id"])
        is_chat, is_forced, has_usage = await _dialect(root, api_key, name, is_chat=is_chat)
        length = card.get("max_model_len")
        plain = Target(
            url=root,
            model=name,
            is_chat=is_chat,
            is_forced=is_forced,
            has_usage=has_usage,
            prompts=estimated((1, None), (1, None)),
            max_model_len=length if isinstance(length, int) else None,
            owned_by=str(card.get("owned_by") or ""),
        )
        prompts = await _exact_prompts(client, plain, api_key)
    return replace(plain, prompts=prompts or await _estimated_prompts(plain, api_key))


async def _model_card(client: httpx.AsyncClient, model: str | None) -> dict[str, Any]:
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerUnusable(connection_text(client.base_url, error)) from error
    if response.status_code != httpx.codes.OK:
        is_key = response.status_code == httpx.codes.UNAUTHORIZED
        raise ServerUnusable(error_text(response) + (KEY_HINT if is_key else ""))
    try:
        cards: list[dict[str, Any]] = response.json()["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerUnusable(f"{client.base_url} does not list models like OpenAI.") from error
    for card in cards:
        if model in (None, card.get("id")):
            return card
    names = ", ".join(str(card.get("id")) for card in cards) or "none"
    raise ServerUnusable(f"{client.base_url} has no model {model or ''}; it has {names}.")


async def _dialect(
    url: str, api_key: str | None, model: str, *, is_chat: bool
) -> tuple[bool, bool, bool]:
    """Whether to chat, to force lengths, to ask for usage: the most that the server takes."""
    ways = [(is_chat, forced, usage) for usage in (True, False) for forced in (True, False)]
    if not is_chat:
        ways += [(True, forced, usage) for usage in (True, False) for forced in (True, False)]
    seen: Seen | None = None
    for chats, is_forced, has_usage in ways:
        if seen is not None and seen.status == httpx.codes.NOT_FOUND and not chats:
            continue  # there are no completions: the other ways to ask for them need no try
        sender = Sender(
            url, api_key, model=model, is_chat=chats, is_forced=is_forced, has_usage=has_usage,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        async with sender:
            seen = await sender.send(Asked(prompt="Hello", max_tokens=PROBE_TOKENS))
        if seen.is_whole:
            keeps = is_forced and seen.output_tokens in (PROBE_TOKENS, 0)
            return chats, keeps, has_usage and not seen.is_estimated
        if seen.status not in (*UNKNOWN_FIELD, httpx.codes.NOT_FOUND):
            break
    assert seen is not None
    status = "gave no answer" if seen.status is None else f"answered {seen.status} {seen.code}"
    raise ServerUnusable(f"{url} {status} to a first small request: {seen.message}{_hint(seen)}")


def _hint(seen: Seen) -> str:
    return KEY_HINT if seen.status == httpx.codes.UNAUTHORIZED else ""


async def _exact_prompts(
    client: httpx.AsyncClient, target: Target, api_key: str | None
) -> Prompts | None:
    """Token ids where they work, else words of one token; None where the server cannot count."""
    if not target.is_chat and (ids := await _token_ids(client, target)):
        prompts = TokenIds(ids)
        if await _is_counted_so(target, api_key, prompts.make(FEW, Random(1))):
            return prompts
    try:
        return await one_token_words(_counter(client, target))
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


async def _token_ids(client: httpx.AsyncClient, target: Target) -> list[int] | None:
    """Ids of ordinary words in the server's tokenizer."""
    wanted = {"model": target.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    try:
        response = await client.post("/tokenize", json=wanted)
        tokens = response.json()["tokens"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return sorted({token for token in tokens if isinstance(token, int)}) or None


async def _is_counted_so(target: Target, api_key: str | None, prompt: list[int]) -> bool:
    """A prompt of ids is taken, and counts as many tokens."""
    async with target.sender(api_key) as sender:
        seen = await sender.send(Asked(prompt=prompt, max_tokens=1))
    return seen.is_whole and seen.prompt_tokens in (None, len(prompt))


def _counter(client: httpx.AsyncClient, target: Target) -> Count:
    async def count(text: str) -> int:
        body: dict[str, Any] = {"model": target.model}
        if target.is_chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        response = await client.post("/tokenize", json=body)
        response.raise_for_status()
        return int(response.json()["count"])

    return count


async def _estimated_prompts(target: Target, api_key: str | None) -> Prompts:
    chance = Random(2)
    counted = []
    async with target.sender(api_key) as sender:
        for num in (FEW, MANY):
            text = " ".join(chance.choices(WORDS, k=num))
            counted.append((await sender.send(Asked(prompt=text, max_tokens=1))).prompt_tokens)
    return estimated((FEW, counted[0]), (MANY, counted[1]))

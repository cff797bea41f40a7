"""Clients under which a gateway has to stay whole, and the judge of every ending.

A request ends in exactly one of these ways, and what is seen of it must be that and nothing else:

    answer     one JSON body with choices
    stream     events, each choice finished once, then [DONE], then the end of the body
    broken     events, then one error event, then the end of the body; no [DONE]
    refused    an error in OpenAI's form; of the 5xx only 502, 503 and 504
    left       the client itself has gone away
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import aiohttp

from kvota.wire.sse import EventReader
from tests.support.http_client import checked_error

PATIENCE_S: Final = 120.0  # after which a request hangs: all limits of the gateway are far below
PAUSE_MAX_S: Final = 0.02  # between two requests of a client
BACK_OFF_MAX_S: Final = 1.0  # after a 503
SERVER_ERRORS_ALLOWED: Final = frozenset({502, 503, 504})
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """What may be asked: `keys` that are good, limited or wrong, and models with their paths."""

    url: str
    keys: tuple[str, ...]
    models: tuple[str, ...]
    choices_max: int = 2  # in one request
    paths: tuple[str, ...] = (CHAT, CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended for its client; `fault` is what must not happen, in words."""

    kind: str
    fault: str | None = None


@dataclass(slots=True)
class Ledger:
    """All requests of a run, as their clients know them."""

    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)  # ids that must be in the journal exactly once
    left: set[str] = field(default_factory=set)  # ids that may be there, at most once

    @property
    def num_requests(self) -> int:
        return self.endings.total()

    def note(self, request_id: str, ending: Ending) -> None:
        self.endings[ending.kind] += 1
        (self.left if ending.kind == "left" else self.answered).add(request_id)
        if ending.fault is not None:
            self.faults.append(f"{request_id}: {ending.fault}")


class Worker:
    """One client after another on one keep-alive pool."""

    def __init__(self, name: str, menu: Menu, chance: Random, ledger: Ledger) -> None:
        self._name = name
        self._menu = menu
        self._chance = chance
        self._ledger = ledger

    async def run(self, session: aiohttp.ClientSession, may_ask: Callable[[int], bool]) -> None:
        """Ask as long as `may_ask`, which hears how often that was; every answer is waited for."""
        for number in itertools.count(1):
            if not may_ask(number):
                return
            ending = await self.ask(session, f"{self._name}-{number}")
            pause_s = BACK_OFF_MAX_S if ending.kind == "refused 503" else PAUSE_MAX_S
            await asyncio.sleep(self._chance.random() * pause_s)

    async def ask(self, session: aiohttp.ClientSession, request_id: str) -> Ending:
        """Ask for something, and note how it ended."""
        chance, menu = self._chance, self._menu
        path = chance.choice(menu.paths)
        body = self._body(path)
        headers = {
            "x-request-id": request_id,
            "authorization": f"Bearer {chance.choice(menu.keys)}",
        }
        if chance.random() < 0.2:
            headers["x-kvota-conversation"] = f"c{chance.randrange(5)}"
        if chance.random() < 0.05:
            headers["x-kvota-deadline-s"] = str(round(chance.uniform(0.05, 1.0), 2))
        leaves_s = chance.uniform(0.0, 0.3) if chance.random() < 0.15 else None
        ending = await _ended(session, menu.url + path, body, headers, leaves_s)
        self._ledger.note(request_id, ending)
        return ending

    def _body(self, path: str) -> dict[str, Any]:
        chance = self._chance
        text = " ".join(["word"] * chance.choice((1, 5, 50, 400)))
        body: dict[str, Any] = {"model": chance.choice(self._menu.models)}
        body |= (
            {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        )
        body["max_tokens"] = chance.choice((1, 4, 24, 200))
        body["stream"] = chance.random() < 0.7
        if chance.random() < 0.2:
            body["n"] = self._menu.choices_max
        if body["stream"] and chance.random() < 0.4:
            body["stream_options"] = {"include_usage": True}
        return body


async def _ended(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str],
    leaves_s: float | None,
) -> Ending:
    """Ask and read to the end, or go away after `leaves_s`."""
    try:
        async with asyncio.timeout(PATIENCE_S if leaves_s is None else leaves_s):
            async with session.post(url, json=body, headers=headers) as response:
                content = await response.read()
        return judged(response.status, response.content_type, content, body.get("n", 1))
    except TimeoutError:
        if leaves_s is not None:
            return Ending("left")
        return Ending("hung", f"no end within {PATIENCE_S:g} s")
    except aiohttp.ClientError as error:
        return Ending("cut", f"the connection ended in the middle: {error!r}")


def judged(status: int, content_type: str, content: bytes, num_choices: int) -> Ending:
    """What an answer that was read to its end is, and what is wrong with it."""
    if status == 200 and content_type == "text/event-stream":
        return _judged_stream(
            [value.decode() for value in EventReader().feed(content)], num_choices
        )
    if status == 200:
        choices = json.loads(content).get("choices", [])
        fault = None if len(choices) == num_choices else f"{len(choices)} choices"
        return Ending("answer", fault)
    kind = f"refused {status}"
    if status >= 500 and status not in SERVER_ERRORS_ALLOWED:
        return Ending(kind, f"status {status}: {content[:300].decode(errors='replace')}")
    try:
        checked_error(json.loads(content))
    except (AssertionError, ValueError) as error:
        return Ending(kind, f"an error without its form: {error}")
    return Ending(kind)


def _judged_stream(events: Sequence[str], num_choices: int) -> Ending:
    finished: Counter[int] = Counter()
    endings = [at for at, event in enumerate(events) if event == "[DONE]" or '"error"' in event[:9]]
    if not endings:
        return Ending("broken", f"a stream of {len(events)} events without an ending")
    if endings != [len(events) - 1]:
        return Ending("broken", f"{len(endings)} endings, and events after the first")
    if events[-1] != "[DONE]":
        checked_error(json.loads(events[-1]))
        return Ending("broken")
    for event in events[:-1]:
        for part in json.loads(event).get("choices", ()):
            finished[part["index"]] += part.get("finish_reason") is not None
    is_whole = sorted(finished.elements()) == list(range(num_choices))
    return Ending("stream", None if is_whole else f"choices finished so often: {dict(finished)}")

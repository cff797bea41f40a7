"""`kvota chat`: a conversation with a running server, streamed into the terminal.

Works with any OpenAI-compatible server. Reads lines from `ask`, writes text through `show`, so
that a test can hold the conversation as well as a terminal.
"""

import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import httpx

from kvota.tools.server import (
    ServerUnusable,
    authorization,
    connection_text,
    error_text,
    root_of,
)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
HELP = "Commands: /clear forgets the conversation, /quit (or Ctrl-D) ends it."


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(
        self,
        client: httpx.Client,
        *,
        model: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self._client = client
        self.model = model or _first_model(client)
        self._system = _readable(system) if system else None
        self._options = {
            name: value
            for name, value in (("max_tokens", max_tokens), ("temperature", temperature))
            if value is not None
        }
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> Generator[str, None, None]:
        """Send a message and yield the answer's pieces as they arrive.

        The exchange is kept only if the answer came to its end or the reader stopped it early
        with some text shown. Raises ServerUnusable.
        """
        self.messages.append({"role": "user", "content": _readable(text)})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "stream": True}
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json=body | self._options
            ) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ServerUnusable(error_text(response))
                yield from _deltas(response.iter_lines())
        except httpx.HTTPError as error:
            raise ServerUnusable(connection_text(self._client.base_url, error)) from error


def _readable(text: str) -> str:
    """What was typed or piped in, with a question mark for each byte that is no UTF-8."""
    return text.encode(errors="replace").decode()


def connect(url: str, api_key: str | None = None) -> httpx.Client:
    """A client for the server at `url` (with or without a trailing /v1)."""
    return httpx.Client(
        base_url=root_of(url),
        headers=authorization(api_key),
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
    )


def converse(
    conversation: Conversation, *, ask: Callable[[], str], show: Callable[[str], None]
) -> None:
    """Hold a conversation until `ask` raises EOFError or the user types /quit.

    Ctrl-C stops the answer that is being written; the connection closes, so the server stops too.
    """
    show(f"{conversation.model}. {HELP}\n")
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/clear":
            conversation.clear()
            show("Forgotten.\n")
        elif text.startswith("/"):
            show(f"No such command: {text}. {HELP}\n")
        elif text:
            _answer(conversation, text, show)


def _answer(conversation: Conversation, text: str, show: Callable[[str], None]) -> None:
    pieces = conversation.say(text)
    try:
        for piece in pieces:
            show(piece)
        show("\n")
    except KeyboardInterrupt:
        pieces.close()  # closes the connection
        show(" …stopped\n")
    except ServerUnusable as error:
        show(f"{error.message}\n")


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise ServerUnusable(f"The answer broke off: {event['error']['message']}")
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerUnusable(connection_text(client.base_url, error)) from error
    if response.status_code != httpx.codes.OK:
        raise ServerUnusable(error_text(response))
    return str(response.json()["data"][0]["id"])

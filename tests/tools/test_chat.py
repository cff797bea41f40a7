import json

import httpx
import pytest

from kvota.tools.chat import Conversation, converse
from kvota.tools.server import ServerUnusable, connection_text


def sse(*pieces: str, error: str | None = None) -> bytes:
    events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    events += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    lines = ["data: " + json.dumps(event) for event in events]
    lines.append("data: " + json.dumps({"error": {"message": error}}) if error else "data: [DONE]")
    return "\n\n".join([": heartbeat", *lines, ""]).encode()


class FakeServer:
    """Answers each chat with the next of its scripted replies and remembers what it was sent."""

    def __init__(self, *replies: httpx.Response) -> None:
        self._replies = iter(replies)
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(request.content))
        return next(self._replies)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://test", transport=httpx.MockTransport(self))


def answer(*pieces: str, error: str | None = None) -> httpx.Response:
    return httpx.Response(200, content=sse(*pieces, error=error))


def talk(server: FakeServer, *lines: str) -> str:
    waiting = iter(lines)

    def ask() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    shown: list[str] = []
    converse(Conversation(server.client(), system="Be kind."), ask=ask, show=shown.append)
    return "".join(shown)


def test_a_conversation_remembers_what_was_said() -> None:
    server = FakeServer(answer("Hel", "lo"), answer("Bye"))
    assert talk(server, "Hi", "See you").endswith("Hello\nBye\n")
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "See you"},
    ]
    assert server.bodies[0]["model"] == "tiny"


def test_bytes_that_are_no_text_are_sent_as_question_marks() -> None:
    """What a shell hands over of them are halves of characters, which no JSON can hold."""
    server = FakeServer(answer("What?"))
    typed = b"caf\xe9 \xe4\xbd\xa0".decode(errors="surrogateescape")
    assert talk(server, typed).endswith("What?\n")
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "caf? 你"},
    ]


def test_clear_forgets_all_but_the_system_message() -> None:
    server = FakeServer(answer("a"), answer("b"))
    talk(server, "one", "/clear", "two")
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "two"},
    ]


def test_a_refusal_is_shown_with_its_retry_after_and_forgotten() -> None:
    refusal = httpx.Response(
        503, json={"error": {"message": "The line is full."}}, headers={"Retry-After": "7"}
    )
    server = FakeServer(refusal, answer("ok"))
    shown = talk(server, "one", "two")
    assert "answered 503: The line is full. Try again in 7 s." in shown
    assert len(server.bodies[1]["messages"]) == 2  # type: ignore[arg-type]


def test_a_stream_that_breaks_says_so() -> None:
    assert "broke off: time is up" in talk(FakeServer(answer("par", error="time is up")), "Hi")


def test_an_interrupted_answer_is_kept_as_far_as_it_was_shown() -> None:
    conversation = Conversation(FakeServer(answer("one", "two", "three")).client())
    pieces = conversation.say("count")
    assert next(pieces) == "one"
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "one"}


def test_an_unknown_command_is_not_sent() -> None:
    server = FakeServer()
    assert "No such command: /help" in talk(server, "/help", "/quit")
    assert server.bodies == []


def test_no_server_says_how_to_start_one() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(refuse))
    with pytest.raises(ServerUnusable, match="kvota serve"):
        Conversation(client)


def test_a_url_that_is_none_is_said_in_one_sentence() -> None:
    error = httpx.UnsupportedProtocol("Request URL is missing an 'http://' protocol.")
    text = connection_text(httpx.URL("127.0.0.1:9"), error)
    assert text.startswith("Cannot talk to 127.0.0.1:9: Request URL is missing")
    assert ".." not in text


def test_an_error_without_words_is_told_by_its_name() -> None:
    text = connection_text(httpx.URL("https://127.0.0.1:9"), httpx.ConnectError(""))
    assert text.startswith("Cannot talk to https://127.0.0.1:9: ConnectError. Is the server")

"""A client of a server at a base URL, whose answers are checked for form whenever they are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvota.wire.sse import EventReader

TIMEOUT_S = 60.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Reply:
    """A whole answer: one JSON body, or all events of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.content = response.content

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it has OpenAI's form."""
        assert self.headers["content-type"] == "application/json", self.headers
        return checked_error(self.json)

    @property
    def events(self) -> list[str]:
        """The `data:` values of a stream, the last one usually [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.content
        return self.events_of(self.content)

    @staticmethod
    def events_of(content: bytes) -> list[str]:
        """The `data:` values of a whole stream."""
        return [value.decode() for value in EventReader().feed(content)]

    @property
    def chunks(self) -> list[Any]:
        return [msgspec.json.decode(value) for value in self.events if value != "[DONE]"]

    @property
    def is_stream(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")

    def text(self, choice: int = 0) -> str:
        """The text of a choice, of chat or completions, streamed or not."""
        if self.is_stream:
            return "".join(self.deltas(choice))
        part = self.json["choices"][choice]
        text: str = part["text"] if "text" in part else part["message"]["content"]
        return text

    def deltas(self, choice: int = 0) -> list[str]:
        """Every piece of text that the stream gave for a choice."""
        parts = self.of_choice(choice)
        return [text_of(part) for part in parts]

    def of_choice(self, choice: int) -> list[Any]:
        """All that the stream said of a choice, in order."""
        found = [part for chunk in self.chunks for part in chunk.get("choices", ())]
        return [part for part in found if part["index"] == choice]

    def finish(self, choice: int = 0) -> str:
        """The finish reason. In a stream it must come exactly once, with the choice's last part."""
        if not self.is_stream:
            reason: str = self.json["choices"][choice]["finish_reason"]
            return reason
        reasons = [part["finish_reason"] for part in self.of_choice(choice)]
        assert reasons, self.content
        assert all(given is None for given in reasons[:-1]), reasons
        assert reasons[-1] is not None, self.content
        return str(reasons[-1])

    @property
    def usage(self) -> dict[str, Any]:
        """Of a body, or of the one chunk of a stream that has it."""
        if not self.is_stream:
            body: dict[str, Any] = self.json["usage"]
            return body
        with_usage = [chunk for chunk in self.chunks if chunk.get("usage")]
        assert len(with_usage) == 1, self.content
        found: dict[str, Any] = with_usage[0]["usage"]
        return found


class OpenReply:
    """A stream being read. `next_chunk` skips comments and counts them."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.num_comments = 0
        self._lines = response.iter_lines()

    def next_event(self) -> str | None:
        """The next `data:` value; None at the end of the stream."""
        for line in self._lines:
            if line.startswith(":"):
                self.num_comments += 1
            elif line.startswith("data: "):
                return line.removeprefix("data: ")
        return None

    def next_line(self) -> str:
        """The next line as it is; for tests that look at comments."""
        return next(self._lines)

    def next_chunk(self) -> Any:
        event = self.next_event()
        assert event is not None, "the stream has ended"
        return msgspec.json.decode(event)

    def next_text(self) -> str:
        """The next piece of the first choice's text that is not empty."""
        text = ""
        while not text:
            text = "".join(map(text_of, self.next_chunk()["choices"]))
        return text

    def rest(self) -> list[str]:
        """All remaining `data:` values."""
        return list(iter(self.next_event, None))


class Client:
    """Talks to one server. Close it."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)

    def close(self) -> None:
        self.http.close()

    def chat_body(self, text: str = "hi", /, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, **fields}

    def chat(self, text: str = "hi", /, **fields: Any) -> Reply:
        return self.post(CHAT, self.chat_body(text, **fields))

    def complete(self, prompt: Any = "hi", **fields: Any) -> Reply:
        return self.post(COMPLETIONS, {"model": self.model, "prompt": prompt, **fields})

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """`body` is JSON to be, or bytes. Header names are written with underscores."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {"content-type": "application/json", **dashed(headers)}
        return Reply(self.http.post(path, content=content, headers=named))

    def get(self, path: str, **headers: str) -> Reply:
        return Reply(self.http.get(path, headers=dashed(headers)))

    @contextmanager
    def stream(self, path: str, body: Mapping[str, Any], **headers: str) -> Iterator[OpenReply]:
        """A stream that is read piece by piece; leaving the block closes the connection."""
        content = {"model": self.model, **body, "stream": True}
        with self.http.stream("POST", path, json=content, headers=dashed(headers)) as response:
            yield OpenReply(response)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels: `kvota_kv_blocks{state=used}`."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").content.decode()):
            for sample in family.samples:
                samples[sample.name + _labels(sample.labels)] = sample.value
        return samples

    def metric(self, name: str) -> float:
        """The sum over all samples of this name."""
        return sum(v for k, v in self.metrics().items() if k == name or k.startswith(name + "{"))


def text_of(part: Any) -> str:
    """What one part of a stream adds to its choice's text."""
    return part.get("text") or part.get("delta", {}).get("content") or ""


def joined_text(events: Sequence[str]) -> str:
    """The text of all `data:` values of a stream with one choice."""
    chunks = [msgspec.json.decode(event) for event in events if event != "[DONE]"]
    return "".join(text_of(part) for chunk in chunks for part in chunk.get("choices", ()))


def checked_error(body: Any) -> dict[str, Any]:
    """The object under `error`: OpenAI's four fields, a message, no traceback."""
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert isinstance(error["type"], str), error
    assert error["param"] is None or isinstance(error["param"], str), error
    assert error["code"] is None or isinstance(error["code"], str), error
    assert not re.search(r"Traceback|File \"", error["message"]), error
    return error


def dashed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{k}={v}' for k, v in labels.items())}}}" if labels else ""

"""What a client gets of a backend's answer, good or bad, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvota.core.clock import SystemClock
from kvota.core.errors import ClientClosed, ContentFiltered, Refusal, Refused, RequestTimeout
from kvota.edge.exchange import beside
from kvota.gateway.upstream.assembly import AssembledBody
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind, RejectedByBackend
from kvota.gateway.upstream.passage import Ask, Tally
from kvota.gateway.upstream.relay import Relay, while_client_stays
from tests.support import fake_backend as fake
from tests.support.exchange_client import ExchangeClient
from tests.support.fake_backend import FakeBackend, Wire

CHAT, COMPLETIONS = fake.GENERATING
CLOCK = SystemClock()
PATIENCE_S = 60.0
STREAM = Ask(is_stream=True)
TEXT = "".join(fake.words(8))


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


class Watch:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, bool]] = []
        self.prompt_tokens: int | None = None

    def prompt_counted(self, num_tokens: int) -> None:
        self.prompt_tokens = num_tokens

    def produced(self, choice: int, num_tokens: int, *, is_done: bool) -> None:
        self.told.append((choice, num_tokens, is_done))


class World:
    """One backend and the connection to it."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.settings = UpstreamSettings(name="b", url=backend.url)
        self.upstream = Upstream(self.settings, CLOCK)
        self.tally: Tally | None = None

    async def reset(self, **settings: Any) -> None:
        await self.upstream.close()
        self.settings = UpstreamSettings(name="b", url=self.backend.url, **settings)
        self.upstream = Upstream(self.settings, CLOCK)

    async def stream(
        self,
        ask: Ask = STREAM,
        *,
        path: str = CHAT,
        deadline_s: float | None = None,
        client: ExchangeClient | None = None,
        **parts: Any,
    ) -> ExchangeClient:
        client = client or ExchangeClient()
        body = asked(ask)
        async with self.upstream.open(path, body, deadline_s=deadline_s) as reply:
            relay = Relay(reply, ask, CLOCK, **parts)
            self.tally = relay.tally
            await relay.stream(client.exchange)
        return client

    async def collect(
        self, ask: Ask | None = None, *, path: str = CHAT, **parts: Any
    ) -> AssembledBody:
        ask = ask or Ask(is_stream=False)
        async with self.upstream.open(path, asked(ask)) as reply:
            relay = Relay(reply, ask, CLOCK, **parts)
            self.tally = relay.tally
            return await relay.collect()


def asked(ask: Ask) -> bytes:
    options = {"include_usage": True}
    return msgspec.json.encode({"stream": True, "stream_options": options, "n": ask.num_choices})


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with FakeBackend() as backend:
        world = World(backend)
        try:
            yield world
        finally:
            await world.upstream.close()


def text_of(client: ExchangeClient, index: int = 0) -> str:
    choices = [one for chunk in client.reply.chunks for one in chunk["choices"]]
    mine = [one for one in choices if one["index"] == index]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in mine)


def finishes_of(client: ExchangeClient) -> list[tuple[int, str]]:
    choices = [one for chunk in client.reply.chunks for one in chunk["choices"]]
    return [(one["index"], one["finish_reason"]) for one in choices if one["finish_reason"]]


# --- a good backend


@pytest.mark.parametrize("path", fake.GENERATING)
async def test_a_stream_arrives_whole_and_in_order(world: World, path: str) -> None:
    client = await world.stream(path=path)
    assert client.reply.status == 200
    assert client.reply.headers["content-type"].startswith("text/event-stream")
    assert text_of(client) == TEXT
    assert finishes_of(client) == [(0, "stop")]
    assert client.reply.events[-1] == "[DONE]"
    assert client.reply.is_complete


@pytest.mark.parametrize("split", [1, 2, 7, 13])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_where_the_bytes_were_cut_cannot_be_seen(
    world: World, split: int, newline: bytes
) -> None:
    content = b"".join(fake.events(num_tokens=4)).replace(b"w1", "wé日😀".encode())
    content = b": a remark\n\n" + content.replace(b"data: {", b"data:{")
    whole = content.replace(b"\n", newline)
    world.backend.scripts.append(fake.says(whole))
    expected = await world.stream(Ask(is_stream=True, wants_usage=True))

    async def in_pieces(one: fake.Received, wire: Wire) -> None:
        await wire.head()
        await wire.send_split(whole, split)
        await wire.end()

    world.backend.scripts.append(in_pieces)
    client = await world.stream(Ask(is_stream=True, wants_usage=True))
    assert client.reply.content == expected.reply.content
    assert "wé日😀" in text_of(client)
    assert client.reply.chunks[-1]["usage"]["completion_tokens"] == 4


async def test_an_event_of_a_megabyte_passes(world: World) -> None:
    big = fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "x" * 2**20, finish="stop")]))
    world.backend.script = fake.says(big, fake.DONE)
    assert len(text_of(await world.stream())) == 2**20


async def test_several_choices_end_once_each(world: World) -> None:
    client = await world.stream(Ask(is_stream=True, num_choices=3))
    assert [text_of(client, index) for index in range(3)] == [TEXT] * 3
    assert sorted(finishes_of(client)) == [(0, "stop"), (1, "stop"), (2, "stop")]


async def test_connections_are_used_again(world: World) -> None:
    for _ in range(3):
        await world.stream()
        await world.collect()
    assert world.backend.num_connections == 1


# --- usage


@pytest.mark.parametrize("usage", ["end", "finish", "every", None])
@pytest.mark.parametrize("wants_usage", [True, False])
async def test_usage_is_counted_and_told_once_if_asked(
    world: World, usage: str | None, wants_usage: bool
) -> None:
    world.backend.script = fake.streams(8, usage=usage)
    client = await world.stream(Ask(is_stream=True, wants_usage=wants_usage, prompt_tokens=5))
    assert world.tally is not None
    assert (world.tally.prompt_tokens, world.tally.output_tokens) == (5, 8)
    assert world.tally.is_exact == (usage is not None)
    told = [chunk for chunk in client.reply.chunks if chunk.get("usage")]
    assert len(told) == wants_usage
    if wants_usage:
        assert told == client.reply.chunks[-1:]
        assert told[0]["choices"] == []
        assert told[0]["usage"]["total_tokens"] == 13
        assert told[0]["id"] == client.reply.chunks[0]["id"]


async def test_running_usage_reaches_only_who_asked_for_it(world: World) -> None:
    world.backend.script = fake.streams(8, usage="every")
    ask = Ask(is_stream=True, wants_usage=True, wants_running_usage=True)
    counts = [one["usage"]["completion_tokens"] for one in (await world.stream(ask)).reply.chunks
              if one.get("usage")]  # fmt: skip
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 8]


@pytest.mark.parametrize(
    "wrong", [{"completion_tokens": 0}, {"completion_tokens": -3}, {"completion_tokens": 10**9},
              {"completion_tokens": "many"}, {"prompt_tokens": 5}, "none"],
)  # fmt: skip
async def test_usage_that_cannot_be_true_is_not_believed(world: World, wrong: Any) -> None:
    last = fake.event(fake.chunk(CHAT, [], usage=wrong))
    world.backend.script = fake.says(*fake.events(usage=None, is_done=False), last, fake.DONE)
    ask = Ask(is_stream=True, wants_usage=True, prompt_tokens=7, output_tokens_max=100)
    client = await world.stream(ask)
    usage = client.reply.chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 8, 15)


@pytest.mark.parametrize("absurd", [-1, 2**31 + 1, 2**63, 2**64])
async def test_counts_of_a_prompt_that_no_prompt_has_are_not_believed(
    world: World, absurd: int
) -> None:
    """One of them ended the gateway when it was written down."""
    details = {"cached_tokens": absurd}
    usage: dict[str, Any] = {
        "prompt_tokens": absurd, "completion_tokens": 8, "prompt_tokens_details": details
    }  # fmt: skip
    last = fake.event(fake.chunk(CHAT, [], usage=usage))
    world.backend.script = fake.says(*fake.events(usage=None, is_done=False), last, fake.DONE)
    watch = Watch()
    await world.stream(Ask(is_stream=True, prompt_tokens=7), watcher=watch)
    assert watch.prompt_tokens is None
    tally = world.tally
    assert tally is not None
    assert (tally.cached_tokens, tally.output_tokens) == (0, 8)
    assert (tally.prompt_tokens or 7) == 7


async def test_running_usage_tells_of_chunks_with_several_tokens(world: World) -> None:
    parts = [
        fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "many words")], usage=fake.usage_of(5, 4))),
        fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "!", finish="stop")],
                              usage=fake.usage_of(5, 9))),
    ]  # fmt: skip
    watch = Watch()
    world.backend.script = fake.says(*parts, fake.DONE)
    await world.stream(watcher=watch)
    # What comes together is told once.
    assert watch.told in ([(0, 4, False), (0, 9, True)], [(0, 9, True)])
    assert watch.prompt_tokens == 5


async def test_the_watcher_hears_of_every_choice(world: World) -> None:
    watch = Watch()
    await world.stream(Ask(is_stream=True, num_choices=2), watcher=watch)
    assert watch.told[-2:] == [(0, 8, True), (1, 8, True)]
    told = [num for choice, num, _ in watch.told if choice == 1]
    assert told == sorted(set(told)), "each time more"


# --- the first token


@pytest.mark.parametrize(
    "delta",
    [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"},
     {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}],
)  # fmt: skip
async def test_the_first_token_is_the_first_that_says_anything(world: World, delta: Any) -> None:
    can_speak = asyncio.Event()
    said = {"index": 0, "delta": delta, "finish_reason": None}

    async def slow(asked: fake.Received, wire: Wire) -> None:
        await wire.head()
        await wire.send(fake.event(fake.chunk(CHAT, [fake.role()])))
        await wire.send(b": queued position=1\n\n")
        await can_speak.wait()
        await wire.send(fake.event(fake.chunk(CHAT, [said])))
        await wire.send(fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "", finish="stop")])))
        await wire.send(fake.DONE)
        await wire.end()

    world.backend.script = slow
    async with world.upstream.open(CHAT, asked(STREAM)) as reply:
        relay = Relay(reply, STREAM, CLOCK)
        beginning = asyncio.create_task(relay.begin())
        await until(lambda: relay.remark() != "heartbeat")
        before_s = CLOCK.now()
        assert relay.tally.first_token_s is None
        can_speak.set()
        await beginning
        assert relay.tally.first_token_s is not None
        assert relay.tally.first_token_s >= before_s


async def test_an_answer_of_nothing_has_no_first_token(world: World) -> None:
    end = fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "", finish="stop")]))
    world.backend.script = fake.says(end, fake.DONE)
    client = await world.stream()
    assert finishes_of(client) == [(0, "stop")]
    assert world.tally is not None
    assert world.tally.first_token_s is None
    assert world.tally.output_tokens == 0


# --- what is changed


@pytest.mark.parametrize("spaces", [True, False])
async def test_the_model_is_called_what_the_client_calls_it(world: World, spaces: bool) -> None:
    content = b"".join(fake.events())
    if not spaces:
        content = content.replace(b'": ', b'":')
    world.backend.script = fake.says(content)
    client = await world.stream(Ask(is_stream=True, wants_usage=True, model="tëam/best"))
    assert {chunk["model"] for chunk in client.reply.chunks} == {"tëam/best"}
    assert text_of(client) == TEXT


async def test_a_text_that_looks_like_the_models_name_stays(world: World) -> None:
    spoken = f'"model": "{fake.MODEL}"'
    parts = [fake.piece(CHAT, spoken, finish="stop")]
    first = {"choices": parts, "model": fake.MODEL, "id": "x", "object": "o", "created": 1}
    world.backend.script = fake.says(fake.event(first), fake.DONE)
    client = await world.stream(Ask(is_stream=True, model="other"))
    assert text_of(client) == spoken
    assert client.reply.chunks[0]["model"] == "other"


async def test_nothing_follows_the_end_of_a_choice(world: World) -> None:
    late = [
        fake.event(fake.chunk(CHAT, [fake.piece(CHAT, " more", finish="length")])),
        fake.event(fake.chunk(CHAT, [fake.piece(CHAT, "", finish="stop")])),
    ]
    world.backend.script = fake.says(*fake.events(is_done=False), *late, fake.DONE)
    client = await world.stream()
    assert finishes_of(client) == [(0, "stop")]
    assert text_of(client) == TEXT


class Uppercase:
    """Holds back the last character of every text until its end; does not like w5."""

    def __init__(self, forbidden: str = "?") -> None:
        self.forbidden = forbidden
        self.held: dict[str, str] = {}

    def feed(self, stream: str, text: str) -> str:
        text = self.held.get(stream, "") + text
        if self.forbidden in text:
            raise ContentFiltered("no")
        self.held[stream] = text[-1:]
        return text[:-1].upper()

    def finish(self, stream: str) -> str:
        return self.held.pop(stream, "").upper()


@pytest.mark.parametrize("path", fake.GENERATING)
async def test_texts_go_through_the_filter(world: World, path: str) -> None:
    client = await world.stream(Ask(is_stream=True, num_choices=2), path=path,
                                text_filter=Uppercase())  # fmt: skip
    assert [text_of(client, index) for index in range(2)] == [TEXT.upper()] * 2
    body = await world.collect(path=path, text_filter=Uppercase())
    assert TEXT.upper() in str(body.choices[0])


async def test_a_filter_can_end_an_answer(world: World) -> None:
    client = ExchangeClient()
    with pytest.raises(ContentFiltered):
        await world.stream(client=client, text_filter=Uppercase("w5"))
    assert "w5" not in client.reply.content.decode().lower()


# --- bodies


async def test_a_stream_becomes_a_body(world: World) -> None:
    body = await world.collect(Ask(is_stream=False, num_choices=2, model="m"))
    assert (body.object, body.model, body.id) == ("chat.completion", "m", "cmpl-fake")
    assert [one["message"]["content"] for one in body.choices] == [TEXT, TEXT]
    assert [one["finish_reason"] for one in body.choices] == ["stop", "stop"]
    assert body.usage == fake.usage_of(5, 16)
    body = await world.collect(path=COMPLETIONS)
    assert body.object == "text_completion"
    assert body.choices[0]["text"] == TEXT


async def test_a_body_without_usage_gets_our_own_count(world: World) -> None:
    world.backend.script = fake.streams(50, usage=None)
    body = await world.collect(Ask(is_stream=False, prompt_tokens=9))
    assert isinstance(body.usage, dict)
    assert (body.usage["prompt_tokens"], body.usage["completion_tokens"]) == (9, 50)


async def test_a_backend_may_answer_with_a_body_at_once(world: World) -> None:
    async def whole(asked: fake.Received, wire: Wire) -> None:
        await wire.json(fake.whole_answer(asked.path, 8))

    world.backend.script = whole
    body = await world.collect(Ask(is_stream=False, model="m"))
    assert body.model == "m"
    assert body.choices[0]["message"]["content"] == TEXT
    assert world.tally is not None
    assert world.tally.output_tokens == 8
    with pytest.raises(AttemptFailed) as failed:
        await world.stream()
    assert failed.value.kind_of_failure is FailureKind.MALFORMED


# --- a bad backend, before any content


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (fake.hangs_up, FailureKind.CUT),
        (fake.begins(1, Wire.drop), FailureKind.CUT),
        (fake.begins(1, Wire.reset), FailureKind.CUT),
        (fake.begins(1, Wire.end), FailureKind.CUT),
        (fake.says(b"data: not json\n\n"), FailureKind.MALFORMED),
        (fake.says(b"data: [1, 2]\n\n"), FailureKind.MALFORMED),
        (fake.says(b'data: {"choices": [{"index": 7, "delta": {"content": "x"}}]}\n\n'),
         FailureKind.MALFORMED),
        (fake.says(fake.DONE), FailureKind.MALFORMED),
        (fake.says(b"<html>oops</html>"), FailureKind.CUT),
        (fake.says(b'data: {"error": {"message": "CUDA out of memory"}}\n\n'),
         FailureKind.ERROR_EVENT),
        (fake.fails(500), FailureKind.STATUS),
        (fake.fails(404), FailureKind.STATUS),
        (fake.fails(302, headers={"location": "/elsewhere"}), FailureKind.STATUS),
        (fake.fails(401), FailureKind.CREDENTIALS),
        (fake.fails(503), FailureKind.FULL),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_failure_before_content_reaches_nobody_and_may_be_tried_elsewhere(
    world: World, script: fake.Script, kind: FailureKind, is_stream: bool
) -> None:
    world.backend.script = script
    client = ExchangeClient()
    with pytest.raises(AttemptFailed) as failed:
        await (world.stream(client=client) if is_stream else world.collect())
    assert failed.value.kind_of_failure is kind
    assert failed.value.before_first_byte
    assert failed.value.status == 502
    assert not client.exchange.is_started
    assert len(world.backend.generations) == 1, "nothing is sent twice"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("error", "wanted"), [
    ({"message": "no credit", "code": 402}, AttemptFailed),
    ({"message": "too long", "code": 400}, RejectedByBackend),
])  # fmt: skip
async def test_an_error_with_a_good_status_is_told_as_one(
    world: World, error: dict[str, Any], wanted: type[Exception], is_stream: bool
) -> None:
    async def script(asked: fake.Received, wire: Wire) -> None:
        await wire.json({"error": error})

    world.backend.script = script
    with pytest.raises(wanted, match=error["message"]):
        await (world.stream() if is_stream else world.collect())


@pytest.mark.parametrize("choices", [
    [], [{"index": 0}], [{"message": None}], [{"message": "x"}], [{"index": "a", "text": "x"}],
    [{"index": 0, "text": "x"}, {"index": 1, "text": 5}],
])  # fmt: skip
async def test_a_body_whose_choices_say_nothing_is_a_failed_attempt(
    world: World, choices: list[Any]
) -> None:
    async def script(asked: fake.Received, wire: Wire) -> None:
        await wire.json({"object": "chat.completion", "choices": choices})

    world.backend.script = script
    with pytest.raises(AttemptFailed) as failed:
        await world.collect()
    assert failed.value.kind_of_failure is FailureKind.MALFORMED
    assert failed.value.before_first_byte


async def test_an_event_of_several_lines_goes_out_as_one(world: World) -> None:
    lines = [json.dumps(json.loads(one[6:]), indent=1) for one in fake.events(is_done=False)]
    spread = ["".join(f"data:{line}\r\n" for line in one.split("\n")) for one in lines]
    world.backend.script = fake.says(*(f"{one}\r\n".encode() for one in spread), fake.DONE)
    client = await world.stream()
    assert text_of(client) == TEXT
    content = client.reply.content.decode()
    assert all(line.startswith("data: ") for line in content.split("\n") if line)


async def test_the_content_type_may_be_written_in_any_case(world: World) -> None:
    async def script(asked: fake.Received, wire: Wire) -> None:
        await wire.head(content_type="Text/Event-Stream; Charset=UTF-8")
        for event in fake.events(asked.path):
            await wire.send(event)
        await wire.end()

    world.backend.script = script
    assert text_of(await world.stream()) == TEXT


async def test_an_error_in_older_vllms_form_is_one(world: World) -> None:
    said = b'data: {"object": "error", "message": "out of memory", "code": 500}\n\n'
    world.backend.script = fake.says(said, fake.DONE)
    with pytest.raises(AttemptFailed, match="out of memory") as failed:
        await world.stream()
    assert failed.value.kind_of_failure is FailureKind.ERROR_EVENT


async def test_much_that_is_no_content_is_bounded(world: World) -> None:
    roles = b"".join([fake.event(fake.chunk(CHAT, [fake.role()]))] * 500)
    world.backend.script = fake.says(*[roles] * 10)
    with pytest.raises(AttemptFailed) as failed:
        await world.stream()
    assert failed.value.kind_of_failure is FailureKind.MALFORMED
    assert failed.value.before_first_byte


async def test_a_role_is_not_content(world: World) -> None:
    world.backend.script = fake.begins(1, Wire.stall)
    await world.reset(first_byte_timeout_s=0.5)
    client = ExchangeClient()
    with pytest.raises(AttemptFailed) as failed:
        await world.stream(client=client)
    assert failed.value.kind_of_failure is FailureKind.FIRST_BYTE_TIMEOUT
    assert failed.value.before_first_byte
    assert not client.exchange.is_started


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_clients_mistake_is_told_as_the_backend_said_it(
    world: World, status: int
) -> None:
    error = {"message": "bad temperature", "type": "BadRequestError", "param": "t", "code": "c"}
    world.backend.script = fake.fails(status, {"error": error})
    with pytest.raises(RejectedByBackend) as rejected:
        await world.stream()
    assert rejected.value.status == status
    said = rejected.value
    assert (said.message, said.kind, said.param, said.code) == (
        "bad temperature", "BadRequestError", "t", "c",
    )  # fmt: skip


async def test_a_full_backend_says_when_to_come_back(world: World) -> None:
    world.backend.script = fake.fails(429, headers={"retry-after": "7"})
    with pytest.raises(AttemptFailed) as failed:
        await world.stream()
    assert failed.value.retry_after_s == 7
    refused = failed.value.for_client()
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == 7


async def test_a_nodes_refusal_in_a_stream_keeps_its_code(world: World) -> None:
    """A heartbeat has opened the node's stream; then the time in line was over."""
    error = {"message": "too long in line", "type": "overloaded_error", "code": "queue_timeout"}
    said = fake.event({"error": {**error, "param": None}})
    world.backend.script = fake.says(b": queued position=3 eta_s=12\n\n", said)
    with pytest.raises(AttemptFailed) as failed:
        await world.stream()
    refused = failed.value.for_client()
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.QUEUE_TIMEOUT


async def test_a_nodes_place_in_line_is_told_on(world: World) -> None:
    has_queued = asyncio.Event()

    async def queued(asked: fake.Received, wire: Wire) -> None:
        await wire.head()
        await wire.send(b": queued position=3 eta_s=12\n\n")
        await has_queued.wait()
        for one in fake.events():
            await wire.send(one)
        await wire.end()

    world.backend.script = queued
    async with world.upstream.open(CHAT, asked(STREAM)) as reply:
        relay = Relay(reply, STREAM, CLOCK)
        beginning = asyncio.create_task(relay.begin())
        await until(lambda: relay.remark() != "heartbeat")
        assert relay.remark() == "queued position=3 eta_s=12"
        has_queued.set()
        await beginning
        assert relay.tally.output_tokens >= 1


async def test_a_silence_before_the_first_token_is_bridged_with_comments(world: World) -> None:
    can_speak = asyncio.Event()

    async def slow(asked: fake.Received, wire: Wire) -> None:
        await wire.head()
        await wire.send(b": queued position=3 eta_s=12\n\n")
        await can_speak.wait()
        await wire.send(b"".join(fake.events()))
        await wire.end()

    world.backend.script = slow
    client = ExchangeClient(heartbeat_s=0.05)
    async with world.upstream.open(CHAT, asked(STREAM)) as reply:
        relay = Relay(reply, STREAM, CLOCK)
        async with beside(client.exchange.keep_alive(relay.remark)):
            streaming = asyncio.create_task(relay.stream(client.exchange))
            await until(lambda: client.reply.comments >= 3)
            assert client.reply.events == []
            can_speak.set()
            await streaming
    assert "queued position=3 eta_s=12" in client.reply.remarks
    assert text_of(client) == TEXT
    assert client.reply.events[-1] == "[DONE]"


# --- a bad backend, after content


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        (Wire.drop, FailureKind.CUT),
        (Wire.reset, FailureKind.CUT),
        (Wire.end, FailureKind.CUT),
        (Wire.stall, FailureKind.IDLE_TIMEOUT),
        (lambda wire: wire.send(b"data: {\n\n"), FailureKind.MALFORMED),
        (lambda wire: wire.send(b'data: {"error": {"message": "boom"}}\n\n'),
         FailureKind.ERROR_EVENT),
        (lambda wire: wire.send(fake.DONE), FailureKind.MALFORMED),
        (lambda wire: wire.send(b"data: " + b"x" * 2000), FailureKind.TOO_LARGE),
    ],
)  # fmt: skip
async def test_a_failure_after_content_ends_the_stream_without_done(
    world: World, then: Any, kind: FailureKind
) -> None:
    is_awaited = kind is FailureKind.IDLE_TIMEOUT
    await world.reset(idle_timeout_s=1.0 if is_awaited else PATIENCE_S, line_bytes_max=1000)
    world.backend.script = fake.begins(4, then)
    client = ExchangeClient()
    with pytest.raises(AttemptFailed) as failed:
        await world.stream(client=client)
    assert failed.value.kind_of_failure is kind
    assert not failed.value.before_first_byte
    assert text_of(client) == "w0 w1 w2"
    assert "[DONE]" not in client.reply.events
    assert finishes_of(client) == []
    assert world.tally is not None
    assert world.tally.output_tokens == 3


async def test_a_missing_done_is_forgiven_when_every_choice_has_ended(world: World) -> None:
    world.backend.script = fake.streams(8, is_done=False)
    assert (await world.stream()).reply.events[-1] == "[DONE]"


async def test_a_choice_that_never_ends_is_a_failure(world: World) -> None:
    world.backend.script = fake.streams(8, finish=None)
    with pytest.raises(AttemptFailed):
        await world.stream()


async def test_a_missing_last_line_end_is_forgiven(world: World) -> None:
    content = b"".join(fake.events(is_done=False)) + b"data: [DONE]"
    world.backend.script = fake.says(content)
    assert text_of(await world.stream()) == TEXT


async def test_a_backend_that_never_ends_is_cut_at_the_deadline(world: World) -> None:
    world.backend.script = fake.never_ends
    client = ExchangeClient()
    with pytest.raises(RequestTimeout):
        await world.stream(client=client, deadline_s=CLOCK.now() + 1.0)
    assert text_of(client).startswith(" w0 w1")
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)


async def test_a_backend_that_never_pauses_is_cut_at_the_deadline_too(world: World) -> None:
    many = b"".join(fake.events(num_tokens=100, finish=None, usage=None, is_done=False))

    async def flood(asked: fake.Received, wire: Wire) -> None:
        await wire.head()
        while not wire.is_gone.is_set():
            await wire.send(many)

    world.backend.script = flood
    with pytest.raises(RequestTimeout):
        await world.stream(deadline_s=CLOCK.now() + 1.0)
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)


async def test_a_body_is_bounded(world: World) -> None:
    await world.reset(body_bytes_max=5000)
    world.backend.script = fake.never_ends
    with pytest.raises(AttemptFailed) as failed:
        await world.collect()
    assert failed.value.kind_of_failure is FailureKind.TOO_LARGE
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)


# --- a client that leaves


async def serve(world: World, client: ExchangeClient) -> None:
    watching = asyncio.create_task(client.exchange.watch())
    try:
        async with while_client_stays(client.exchange):
            await world.stream(client=client)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize(
    "script", [fake.never_ends, fake.never_answers, fake.begins(1, Wire.stall)]
)
async def test_the_backend_is_closed_when_the_client_leaves(
    world: World, script: fake.Script
) -> None:
    world.backend.script = script
    client = ExchangeClient()
    serving = asyncio.create_task(serve(world, client))
    await until(lambda: bool(world.backend.generations))
    async with asyncio.timeout(PATIENCE_S):
        if script is fake.never_ends:
            await client.has_heard.wait()
        client.leave()
        with pytest.raises(ClientClosed):
            await serving
        await world.backend.generations[0].is_gone.wait()
    assert world.backend.num_connections == 0


async def test_a_stalled_reader_is_cut_off_and_the_backend_closed(world: World) -> None:
    world.backend.script = fake.never_ends
    client = ExchangeClient(send_timeout_s=0.2)
    client.stall()
    with pytest.raises(ClientClosed):
        await world.stream(client=client)
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)


async def test_a_cancelled_server_closes_the_backend(world: World) -> None:
    world.backend.script = fake.never_ends
    client = ExchangeClient()
    streaming = asyncio.create_task(world.stream(client=client))
    await asyncio.wait_for(client.has_heard.wait(), PATIENCE_S)
    streaming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await streaming
    await asyncio.wait_for(world.backend.generations[0].is_gone.wait(), PATIENCE_S)

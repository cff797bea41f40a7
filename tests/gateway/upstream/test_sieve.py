"""A filter on the way out: nothing is lost, nothing is told early, whatever a text is hidden in."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.assembly import Assembler
from kvota.gateway.upstream.chunks import TEXT_FIELDS
from kvota.gateway.upstream.sieve import Sieve

SECRET = "ΣEKPET"  # no letter of which is anywhere else in a chunk


class Found(Exception):
    pass


class HoldsSecrets:
    """Holds back whatever may begin with the secret, and raises where it is there."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}

    def feed(self, stream: str, text: str) -> str:
        text = self._held.get(stream, "") + text
        if SECRET in text:
            raise Found
        num = max(n for n in range(len(SECRET)) if text.endswith(SECRET[:n]))
        self._held[stream] = text[len(text) - num :]
        return text[: len(text) - num]

    def finish(self, stream: str) -> str:
        return self._held.pop(stream, "")


def value(*choices: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"id": "x", "object": "chat.completion.chunk", "choices": choices})


def part(delta: Any, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, **more}


def call(number: int | None, arguments: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": number, "function": {"arguments": arguments, **more}}]}


def old_call(arguments: str, **more: Any) -> dict[str, Any]:
    return {"function_call": {"arguments": arguments, **more}}


def detail(number: int | None, text: str, name: str = "text") -> dict[str, Any]:
    one: dict[str, Any] = {"type": f"reasoning.{name}", name: text}
    return {"reasoning_details": [one if number is None else {"index": number, **one}]}


def sifted(*values: bytes) -> list[bytes]:
    sieve = Sieve(HoldsSecrets())
    return [sieve.chunk(one) for one in values]


def put_together(values: list[bytes]) -> Any:
    whole = Assembler()
    for one in values:
        whole.add(one)
    return whole.body({}).choices


CHAT_FIELDS = [name for name in TEXT_FIELDS if name != "text"]
said = st.tuples(
    st.integers(0, 1),
    st.sampled_from([*CHAT_FIELDS, "function_call", 0, 1]),
    st.sampled_from(["Σ", "ΣE", "ΣEK", "PE", "x"]),
)


@given(st.lists(said, max_size=12))
def test_a_filter_that_holds_back_loses_nothing_and_mixes_nothing(spoken: Any) -> None:
    values = []
    for index, where, text in spoken:
        delta = {where: text} if isinstance(where, str) else call(where, text)
        delta = old_call(text) if where == "function_call" else delta
        logprobs = {"content": [{"token": text}]}
        values.append(value(part(delta, index, logprobs=logprobs, token_ids=[len(text)])))
    values += [value(part({}, index, finish_reason="stop")) for index in (0, 1)]
    try:
        passed = sifted(*values)
    except Found:
        return
    assert put_together(passed) == put_together(values)


@pytest.mark.parametrize("delta", [
    *({name: "{}"} for name in CHAT_FIELDS), call(0, "{}"), call(None, "{}"),
    old_call("{}"), detail(0, "{}"), detail(None, "{}"), detail(1, "{}", "summary"),
])  # fmt: skip
@pytest.mark.parametrize("at", range(1, len(SECRET)))
def test_no_piece_of_a_find_goes_out_wherever_it_is(delta: dict[str, Any], at: int) -> None:
    one, two = (
        value(part(json.loads(json.dumps(delta).replace("{}", text))))
        for text in (f"x{SECRET[:at]}", SECRET[at:])
    )
    sieve = Sieve(HoldsSecrets())
    assert set(sieve.chunk(one).decode()).isdisjoint(SECRET)
    with pytest.raises(Found):
        sieve.chunk(two)


def test_the_texts_of_completions_are_held_as_well() -> None:
    pieces = [{"index": 0, "text": "x Σ"}, {"index": 0, "text": "", "finish_reason": "length"}]
    one, two = (json.loads(each) for each in sifted(*(value(each) for each in pieces)))
    assert one["choices"][0]["text"] == "x "
    assert two["choices"][0]["text"] == "Σ"


def test_logprobs_and_ids_wait_for_their_text() -> None:
    def chunk(text: str, **more: Any) -> bytes:
        logprobs = {"content": [{"token": text}]}
        return value(part({"content": text}, logprobs=logprobs, token_ids=[len(text)], **more))

    passed = [json.loads(one)["choices"][0] for one in sifted(*map(chunk, ("a", "ΣE", "K", "x")))]
    assert [one["logprobs"] is None for one in passed] == [False, True, True, False]
    tokens = [one["token"] for one in passed[3]["logprobs"]["content"]]
    assert (tokens, passed[3]["token_ids"]) == (["ΣE", "K", "x"], [2, 1, 1])


@pytest.mark.parametrize("delta", [None, {}])
def test_what_is_left_goes_out_with_the_end_of_its_choice(delta: Any) -> None:
    logprobs = {"content": [{"token": "Σ"}]}
    *_, last = sifted(
        value(part({"content": "Σ"}, logprobs=logprobs)),
        value(part(call(1, "ΣE", name="f"))),
        value({"index": 0, "delta": delta, "finish_reason": "tool_calls"}),
    )
    [choice] = json.loads(last)["choices"]
    assert choice["delta"]["content"] == "Σ"
    assert choice["delta"]["tool_calls"] == [{"index": 1, "function": {"arguments": "ΣE"}}]
    assert choice["logprobs"] == logprobs


@pytest.mark.parametrize(("delta", "rest"), [
    (old_call("ΣE", name="f"), old_call("ΣE")), (detail(2, "ΣE"), detail(2, "ΣE")),
    (detail(0, "Σ", "summary"), detail(0, "Σ", "summary")),
])  # fmt: skip
@pytest.mark.parametrize("ending", [None, {}])
def test_so_it_does_with_calls_of_older_clients_and_details(
    delta: dict[str, Any], rest: dict[str, Any], ending: Any
) -> None:
    last = {"index": 0, "delta": ending, "finish_reason": "stop"}
    one, two = sifted(value(part(json.loads(json.dumps(delta)))), value(last))
    assert set(one.decode()).isdisjoint(SECRET)
    assert json.loads(two)["choices"][0]["delta"] == rest


@pytest.mark.parametrize("said", [
    {"message": {"content": f"a {SECRET}"}}, {"message": {"content": None, "refusal": SECRET}},
    {"message": call(0, SECRET)}, {"message": call(0, "", name=SECRET)},
    {"message": old_call(SECRET)}, {"message": old_call("", name=SECRET)},
    {"message": detail(0, SECRET)}, {"message": detail(None, SECRET, "summary")},
    {"text": SECRET}, {"text": "x", "message": None, "reasoning": SECRET},
])  # fmt: skip
def test_an_answer_in_one_piece_is_searched_everywhere(said: dict[str, Any]) -> None:
    with pytest.raises(Found):
        Sieve(HoldsSecrets()).whole([{"index": 0, **said}])


def test_an_answer_in_one_piece_is_whole_afterwards() -> None:
    message = {
        "content": "ends with Σ", **call(0, '{"a": "ΣE', name="ΣEK"), **old_call("Σ", name="ΣEK"),
        **detail(None, "ΣE"),
    }  # fmt: skip
    choices = [{"index": 0, "message": json.loads(json.dumps(message))}, {"index": 1, "text": "Σ"}]
    Sieve(HoldsSecrets()).whole(choices)
    assert choices == [{"index": 0, "message": message}, {"index": 1, "text": "Σ"}]


def test_the_name_of_a_tool_is_searched_and_never_cut() -> None:
    [passed] = sifted(value(part(call(0, "", name="ΣEK"))))
    assert json.loads(passed)["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "ΣEK"
    with pytest.raises(Found):
        sifted(value(part(call(0, "", name=SECRET))))

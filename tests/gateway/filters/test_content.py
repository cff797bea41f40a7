import random
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import ConfigError, InvalidRequest
from kvota.gateway.filters import content
from kvota.gateway.filters.blocklists import BlockList, BlockListFilter, Rule
from kvota.gateway.filters.content import FilterFound, Filters, FilterSettings, load_filters
from kvota.wire.openai import ChatRequest, CompletionRequest


def blocking(*literals: str) -> BlockListFilter:
    return BlockListFilter([BlockList(rule=(Rule(name="rule", literals=literals),))])


FILTERS = Filters([blocking("secret"), blocking("hush")])


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert(fields, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert(fields, CompletionRequest)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat(messages=[{"role": "user", "content": "my Secret"}]), "messages"),
        (chat(messages=[{"role": "user", "content": "x", "name": "hush"}]), "messages"),
        (
            chat(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "sec"},
                            {"type": "text", "text": "ret"},
                        ],
                    }
                ]
            ),
            "messages",
        ),
        (
            chat(tools=[{"type": "function", "function": {"name": "f", "description": "hush"}}]),
            "tools",
        ),
        (
            chat(
                tools=[
                    {"type": "function", "function": {"name": "f", "parameters": {"secret": {}}}}
                ]
            ),
            "tools",
        ),
        (chat(structured_outputs={"choice": ["a", "secret"]}), "structured_outputs"),
        (completion(prompt="a secret"), "prompt"),
        (completion(prompt=["a", "a secret"]), "prompt"),
    ],
)
def test_everything_that_a_request_says_is_searched(request_: msgspec.Struct, param: str) -> None:
    with pytest.raises(FilterFound) as found:
        FILTERS.check_request(request_)
    assert (found.value.param, found.value.rule, found.value.status) == (param, "rule", 400)
    assert "secret" not in found.value.message.lower()


def test_an_innocent_request_passes() -> None:
    FILTERS.check_request(
        chat(
            model="secret",  # a name, not a text
            messages=[
                {"role": "user", "content": "sec"},
                {"role": "assistant", "content": "ret"},
                {"role": "user", "content": [{"type": "text", "text": "hus"}]},
            ],
            temperature=0.5,
        )
    )


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]], ["text", [1]]])
def test_token_ids_cannot_pass_by_a_filter_unread(prompt: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="token ids") as refused:
        FILTERS.check_request(completion(prompt=prompt))
    assert refused.value.param == "prompt"
    Filters([]).check_request(completion(prompt=prompt))


def test_texts_are_searched_in_their_order_and_empty_ones_not_at_all() -> None:
    seen = []

    class Listening:
        num_open = 0

        def scan(self) -> "Listening":
            return self

        def feed(self, text: str) -> None:
            seen.append(text)

        def finish(self) -> None: ...

    message = {"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "", "b")]}
    schema = {"enum": ["", "c", ["d"], ""], "": "e"}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    Filters([Listening()]).check_request(chat(messages=[message], tools=[tool]))
    assert [one for one in seen if len(one) == 1 or one == "ab"] == ["ab", *"fcde"]
    assert "" not in seen


def test_a_request_of_more_values_than_can_be_looked_through_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(content, "VALUES_MAX", 100)

    def with_values(number: int) -> ChatRequest:
        function = {"name": "f", "parameters": {"enum": number * [""]}}
        return chat(tools=[{"type": "function", "function": function}])

    FILTERS.check_request(with_values(98))  # beside the tool and its one parameter
    with pytest.raises(InvalidRequest, match="more than 100 values") as refused:
        FILTERS.check_request(with_values(99))
    assert refused.value.param == "tools"
    Filters([]).check_request(with_values(1000))


def streamed(filters: Filters, pieces: Sequence[str]) -> tuple[str, bool]:
    """What a client gets, and whether it was cut off."""
    guard, sent = filters.guard(), ""
    try:
        for piece in pieces:
            sent += guard.push(piece)
        return sent + guard.finish(), False
    except FilterFound:
        return sent, True


def test_output_is_held_back_only_while_it_may_begin_a_find() -> None:
    guard = FILTERS.guard()
    assert guard.push("the se") == "the "
    assert guard.num_held == 2
    assert guard.push("a and sec") == "sea and "
    assert guard.push("") == ""
    assert guard.push("re") == ""
    assert guard.finish() == "secre"
    assert guard.finish() == ""


def test_no_part_of_a_find_is_ever_sent() -> None:
    assert streamed(FILTERS, ["all ", "se", "cr", "et", " lost"]) == ("all ", True)
    assert streamed(FILTERS, ["all hush"]) == ("", True)


def test_the_longer_of_two_open_beginnings_is_held() -> None:
    filters = Filters([blocking("abcd"), blocking("cx")])
    guard = filters.guard()
    assert guard.push("zabc") == "z"
    assert guard.push("!") == "abc!"


@given(
    st.text("abx ", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_stream_is_whole_or_cut_before_the_first_find(
    text: str, words: list[str], chance: random.Random
) -> None:
    pieces, rest = [], text
    while rest:
        cut = chance.randint(1, len(rest))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    sent, was_cut = streamed(Filters([blocking(word) for word in words]), pieces)
    assert was_cut == any(word in text for word in words)
    assert text.startswith(sent)
    assert not any(word in sent for word in words)
    if not was_cut:
        assert sent == text
    else:
        assert len(sent) <= min(text.index(word) for word in words if word in text)


def test_directions_are_switched_apart() -> None:
    only_in = Filters([blocking("hush")], on_output=False)
    only_out = Filters([blocking("hush")], on_input=False)
    with pytest.raises(FilterFound):
        only_in.check_request(completion(prompt="hush"))
    only_out.check_request(completion(prompt="hush"))
    assert (only_in.has_output, only_out.has_output) == (False, True)
    assert streamed(only_in, ["hush"]) == ("hush", False)
    assert streamed(only_out, ["hush"]) == ("", True)


def test_without_filters_text_passes_as_it_comes() -> None:
    guard = load_filters(FilterSettings()).guard()
    assert guard.push("anything") == "anything"
    assert guard.finish() == ""


class EveryThird:
    """A filter of somebody else: finds the third piece, whatever it is."""

    def scan(self) -> "EveryThird.Scan":
        return self.Scan()

    class Scan:
        num_open = 0

        def __init__(self) -> None:
            self._num_pieces = 0

        def feed(self, text: str) -> str | None:
            self._num_pieces += 1
            return "third" if self._num_pieces == 3 else None

        def finish(self) -> str | None:
            return None


def refuses_to_be_made() -> EveryThird:
    raise RuntimeError("no licence")


@pytest.fixture
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [
        EntryPoint(name, f"{__name__}:{target}", content.ENTRY_POINTS)
        for name, target in (
            ("third", "EveryThird"),
            ("broken", "refuses_to_be_made"),
            ("odd", "FilterSettings"),
            ("absent", "nothing_here"),
        )
    ]
    monkeypatch.setattr(content, "entry_points", lambda group: offered)
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])


@pytest.mark.usefixtures("_plugins")
def test_another_package_may_offer_a_filter() -> None:
    filters = load_filters(FilterSettings(block_lists=("chat-markup",), plugins=("third",)))
    assert streamed(filters, ["a", "b", "c"]) == ("ab", True)
    assert streamed(filters, ["a", "[INST]"]) == ("a", True)


@pytest.mark.usefixtures("_plugins")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("thrid", "Those there are: absent, broken, odd, third"),
        ("broken", "no licence"),
        ("odd", "no method `scan`"),
        ("absent", "cannot be made"),
    ],
)
def test_a_filter_that_cannot_be_had_is_named(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_filters(FilterSettings(plugins=(name,)))

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvota.engine.text import TextStream, Vocabulary


def shown(pieces: list[bytes], *stops: str, include_stop: bool = False) -> tuple[list[str], str]:
    """What each token shows, and the whole text, of a stream fed with the pieces in order."""
    stream = TextStream(Vocabulary(pieces), stops=stops, include_stop=include_stop)
    deltas: list[str] = []
    for token in range(len(pieces)):
        text, stop = stream.push(token)
        deltas.append(text)
        if stop is not None:
            return deltas, "".join(deltas)
    deltas.append(stream.flush())
    return deltas, "".join(deltas)


def split(text: str, cuts: list[int]) -> list[bytes]:
    raw = text.encode()
    borders = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[a:b] for a, b in itertools.pairwise(borders)]


def test_a_stop_string_over_several_tokens_never_shows() -> None:
    deltas, text = shown([b"say ", b"<<", b"EN", b"D>", b">", b"x"], "<<END>>")
    assert text == "say "
    assert not any("<" in delta for delta in deltas)


def test_a_broken_stop_string_is_shown_after_all() -> None:
    assert shown([b"say ", b"<<", b"no"], "<<END>>")[1] == "say <<no"


def test_the_end_shows_what_was_held_back() -> None:
    assert shown([b"say ", b"<<", b"EN"], "<<END>>")[1] == "say <<EN"


def test_a_stop_string_may_begin_inside_a_token() -> None:
    assert shown([b"ab", b"cSTOP"], "cS")[1] == "ab"


def test_the_earliest_stop_string_wins() -> None:
    assert shown([b"one two three"], "three", "two")[1] == "one "


def test_the_stop_string_is_kept_when_asked_for() -> None:
    assert shown([b"a", b"b", b"c", b"d"], "bc", include_stop=True)[1] == "abc"


def test_a_character_over_several_tokens_comes_whole() -> None:
    pieces = [b"\xf0\x9f", b"\x98\x80", b"\xed", b"\x95\x9c", b"ok"]
    assert shown(pieces)[0][:5] == ["", "😀", "", "한", "ok"]


def test_a_cut_character_at_the_end_is_dropped() -> None:
    assert shown([b"ok", b"\xf0\x9f"])[1] == "ok"


def test_an_invalid_byte_does_not_hold_back_later_text() -> None:
    deltas, _ = shown([b"\xff", b"a", b"b"])
    assert deltas[:3] == ["\ufffd", "a", "b"]


def test_special_tokens_are_hidden_unless_wanted() -> None:
    vocabulary = Vocabulary([b"a", b"<|end|>"], frozenset({1}))
    hiding, showing = TextStream(vocabulary), TextStream(vocabulary, hide_special=False)
    assert hiding.push(1) == ("", None)
    assert showing.push(1) == ("<|end|>", None)


def test_tokens_past_the_vocabulary_add_nothing() -> None:
    assert TextStream(Vocabulary([b"a"])).push(7) == ("", None)


def test_no_stop_string_is_looked_for_before_it_may_stop() -> None:
    stream = TextStream(Vocabulary([b"END", b"x"]), stops=["END"])
    assert stream.push(0, may_stop=False) == ("END", None)
    assert stream.push(1) == ("x", None)
    assert stream.push(0) == ("", "END")


alphabet = st.text(alphabet="ab<é😀", max_size=24)


@given(alphabet, st.lists(st.integers(0, 60), max_size=12), st.lists(alphabet, max_size=3))
def test_any_split_gives_the_text_up_to_the_first_stop(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    """The oracle: cut the whole text at the stop string that is complete first."""
    stops = [stop for stop in stops if stop]
    pieces = split(text, cuts)
    _, whole = shown(pieces, *stops)
    assert "\ufffd" not in whole
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert whole == text
    else:
        assert text.startswith(whole)
        assert any(text[len(whole) :].startswith(stop) for stop in stops)
        assert not any(stop in whole for stop in stops)

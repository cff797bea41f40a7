"""What the rules see of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.policy.texts import SeenText, Shape, is_one_word, pieces_of, sign_text


def test_english_and_chinese_are_parted_into_words() -> None:
    assert SeenText.of("帮我写SQL语句, please!").words == " 帮我写 sql 语句 please "
    assert SeenText.of("C++ and C#").words == " c++ and c# "


@pytest.mark.parametrize(
    ("sign", "text", "fits"),
    [
        ("sql", "an SQL statement", True),
        ("sql", "mysqlx", False),
        ("sql", "写SQL语句", True),
        ("语句", "写SQL语句吧", True),
        ("sql语句", "写SQL语句", True),
        ("left join", "a LEFT  JOIN b", True),
        ("left join", "a cleft join", False),
        ("go 的", "Go 的 channel", True),
        ("t-sql", "T-SQL script", True),
    ],
)
def test_a_sign_fits_whole_english_words_and_any_part_of_chinese(
    sign: str, text: str, fits: bool
) -> None:
    seen, needle = SeenText.of(text), sign_text(sign)
    assert (needle in seen.words) == fits
    assert not is_one_word(needle) or (needle.strip() in seen.vocabulary) == fits


def test_a_sign_without_words_is_empty() -> None:
    assert sign_text(" ?! ") == ""


@pytest.mark.parametrize(
    ("order", "text", "fits"),
    [
        ("write … function", "Please write a small Python function", True),
        ("write … function", "the function that I write", False),
        ("write … function", "write " + "x " * 100 + "function", False),
        ("write … function", "write " + "x " * 100 + "write a function", True),
        ("write … function", "write function", True),
        ("写 … 函数", "写一个排序函数", True),
        ("a … b … c", "a b c", True),
        ("a … b … c", "a c b", False),
        ("很 … 很", "很", False),
    ],
)
def test_an_order_fits_pieces_that_follow_one_another_closely(
    order: str, text: str, fits: bool
) -> None:
    pieces = [sign_text(piece) for piece in pieces_of(order)]
    assert SeenText.of(text).has_order(pieces) == fits


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("look:\n```\nx\n```", Shape.CODE_FENCE),
        ("def f(x):\n    return x\nprint(f(1))", Shape.CODE_LINES),
        ("I call main() and it hangs", Shape.CODE_PIECES),
        ("Traceback (most recent call last):", Shape.TRACEBACK),
        ("SELECT a\nFROM b", Shape.SQL_STATEMENT),
        ("select a from b where c = 1", Shape.SQL_STATEMENT),
        ("create table t (a int)", Shape.SQL_STATEMENT),
        ("WHERE or HAVING?", Shape.SQL_KEYWORDS),
        ("x" * 1_500, Shape.LONG_TEXT),
        ("x^2 + 1", Shape.FORMULA),
        ("\\frac{1}{2}", Shape.FORMULA),
        ("15% of 200", Shape.PERCENT),
        ("3 apples, 4 pears", Shape.SOME_NUMBERS),
    ],
)
def test_a_shape_is_recognized(text: str, shape: Shape) -> None:
    assert shape in SeenText.of(text).shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("Select a gift from this list", Shape.SQL_STATEMENT),
        ("WHERE are you?", Shape.SQL_KEYWORDS),
        ("Dear class, please read the letter", Shape.CODE_LINES),
        ("On 2024-05-01 we met", Shape.FORMULA),
        ("I had 3 apples", Shape.SOME_NUMBERS),
    ],
)
def test_ordinary_talk_has_no_shape(text: str, shape: Shape) -> None:
    assert shape not in SeenText.of(text).shapes


@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    seen = SeenText.of(text)
    assert seen.words.startswith(" ")
    assert seen.vocabulary == frozenset(seen.words.split(" ")) - {""}


def test_of_a_huge_text_only_both_ends_are_read() -> None:
    text = "alpha " + "x " * 500_000 + "middle " + "x " * 500_000 + "omega"
    seen = SeenText.of(text)
    assert {"alpha", "omega"} <= seen.vocabulary
    assert "middle" not in seen.vocabulary
    assert len(seen.words) < 5_000

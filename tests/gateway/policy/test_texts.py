"""What the rules see of a text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.gateway.policy.texts import Order, SeenText, Shape, Sign


def seen_text(text: str) -> SeenText:
    return SeenText.of(text, 1_000)


def test_english_and_chinese_are_parted_into_words() -> None:
    assert seen_text("帮我写SQL语句, please!").words == " 帮我写 sql 语句 please "
    assert seen_text("C++ and C#").words == " c++ and c# "


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
    assert seen_text(text).has(Sign.of(sign)) == fits


def test_a_sign_without_words_is_empty() -> None:
    assert Sign.of(" ?! ").text == ""


@settings(deadline=None)
@given(st.text(max_size=8), st.text(max_size=40))
def test_what_decides_whether_to_look_never_hides_a_sign(sign: str, text: str) -> None:
    seen, wanted = seen_text(text), Sign.of(sign)
    if wanted.text:
        assert seen.has(wanted) == (wanted.text in seen.words)
        assert wanted.rarest in wanted.parts
        assert not seen.has(wanted) or wanted.rarest in seen.parts


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
    assert seen_text(text).has(Order.of(order)) == fits


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
    assert shape in seen_text(text).shapes


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
    assert shape not in seen_text(text).shapes


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    seen = seen_text(text)
    assert seen.words.startswith(" ")
    assert " " not in seen.parts
    assert all(len(part) == 1 for part in seen.parts if not part.isascii())


def test_of_a_huge_text_only_both_ends_are_read() -> None:
    text = "alpha " + "x " * 500_000 + "middle " + "x " * 500_000 + "omega"
    seen = seen_text(text)
    assert {"alpha", "omega"} <= seen.parts
    assert "middle" not in seen.parts
    assert len(seen.words) < 5_000

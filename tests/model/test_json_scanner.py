"""Against `json.loads`: the scanner accepts exactly the texts of objects that it accepts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.model.json_scanner import DEPTH_MAX, JsonScanner, Place

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def num_accepted(text: str) -> tuple[int, bool]:
    """How many characters are taken, and whether they are a whole object."""
    scanner = JsonScanner()
    for at, char in enumerate(text):
        if not scanner.accept(char):
            return at, False
    return len(text), scanner.place is Place.DONE


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=lambda _: 1 / 0), dict)
    except (ValueError, ZeroDivisionError):
        return False


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]))
def test_every_object_is_accepted_whole(value: object, ascii_only: bool, indent: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert num_accepted(text) == (len(text), True)


@given(OBJECTS, st.data())
def test_a_damaged_object_is_accepted_only_if_json_reads_it(
    value: object, data: st.DataObject
) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(
        st.sampled_from(["", "{", "}", "[", "]", '"', ",", ":", "0", "x", "\\", "\n"])
    )
    damaged = text[:at] + change + text[at + 1 :]
    assert num_accepted(damaged)[1] == (is_object(damaged) and damaged.startswith("{"))


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("[1]", 0),
        (' {"a": 1}', 0),
        ("{'a': 1}", 1),
        ("{a: 1}", 1),
        ('{"a" 1}', 5),
        ('{"a": 1,}', 8),
        ('{"a": [1,]}', 9),
        ('{"a": tru}', 9),
        ('{"a": 01}', 8),
        ('{"a": 1.}', 8),
        ('{"a": -}', 7),
        ('{"a": "\n"}', 7),
        ('{"a": "\\x"}', 8),
        ('{"a": "\\u12g4"}', 11),
        ('{"a": [1}', 8),
        ('{"a": NaN}', 6),
        ('{"a": 1} ', 8),
    ],
)
def test_the_first_character_that_cannot_follow_is_known_at_once(text: str, num: int) -> None:
    assert num_accepted(text) == (num, False)


def test_depth_is_bounded() -> None:
    deepest = '{"a":' + "[" * (DEPTH_MAX - 1)
    assert num_accepted(deepest) == (len(deepest), False)
    assert num_accepted(deepest + "[") == (len(deepest), False)


def test_depth_counts_what_is_open() -> None:
    scanner = JsonScanner()
    depths = []
    for char in '{"a":[{}]}':
        assert scanner.accept(char)
        depths.append(scanner.depth)
    assert depths == [1, 1, 1, 1, 1, 2, 3, 2, 1, 0]

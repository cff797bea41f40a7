import pytest

from kvota.tools.evaluate.agreement import Overlap, agreement, overlap
from kvota.tools.evaluate.answers import Continuation


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("abcd", "abcd", Overlap(4, 4, 4)),
        ("abcd", "abxd", Overlap(4, 2, 3)),
        ("abcd", "ab", Overlap(4, 2, 2)),
        ("xbcd", "abcd", Overlap(4, 0, 3)),
        ("", "ab", Overlap(2, 0, 0)),
        ("", "", Overlap(0, 0, 0)),
    ],
)
def test_overlap(left: str, right: str, expected: Overlap) -> None:
    assert overlap(left, right) == expected
    assert overlap(right, left) == expected


def test_shares_are_of_all_tokens_of_all_prompts() -> None:
    left = [Continuation("", ids=[1, 2, 3, 4]), Continuation("", ids=[5, 6])]
    right = [Continuation("", ids=[1, 9, 3, 4]), Continuation("", ids=[5, 6])]
    found = agreement(left, right, has_same_tokens=True)
    assert found is not None
    shares = found.until_first.mean, found.overall.mean, found.whole.mean
    assert shares == pytest.approx((3 / 6, 5 / 6, 1 / 2))


def test_ids_are_not_compared_with_names() -> None:
    left, right = Continuation("ab", ids=[1, 2]), Continuation("ab", names=["a", "b"])
    found = agreement([left], [right], has_same_tokens=True)
    assert found is not None
    assert not found.is_tokens
    assert found.whole.mean == 1


def test_ids_of_another_tokenizer_are_not_compared() -> None:
    left, right = Continuation("ab", ids=[1, 2]), Continuation("ac", ids=[1, 2])
    found = agreement([left], [right], has_same_tokens=False)
    assert found is not None
    assert found.until_first.mean == 0.5


def test_silence_on_both_sides_says_nothing() -> None:
    silent = [Continuation("", ids=[])]
    assert agreement(silent, silent, has_same_tokens=True) is None

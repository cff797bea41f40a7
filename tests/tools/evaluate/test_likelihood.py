from math import exp

import pytest

from kvota.tools.evaluate.answers import Scored
from kvota.tools.evaluate.divergence import Position
from kvota.tools.evaluate.likelihood import WindowScore, compare_text, compare_tokens, summarize
from kvota.tools.evaluate.windows import Window


def places(*logprobs: float | None) -> list[Position | None]:
    return [None if one is None else Position(0, {0: one}) for one in logprobs]


def test_only_places_that_both_know_after_the_prefix_are_scored() -> None:
    window = Window("t", [9, 1, 2, 3], num_prefix=1)
    left = Scored(places(None, -1.0, -2.0, -3.0))
    right = Scored(places(None, None, -2.5, -3.5))
    found = compare_tokens(window, left, right)
    assert (found.num_tokens, found.baseline, found.candidate) == (2, 5.0, 6.0)


def test_surprise_under_another_tokenizer_counts_over_the_same_bytes() -> None:
    window = Window("t", "wörd and more")  # 14 bytes
    left = Scored(places(None, -4.0, -5.0), ["wörd", " and", " more"])  # 9 bytes scored
    right = Scored(places(None, -2.0, -12.0), ["<s>", "wörd", " and more"])  # all 14
    found = compare_text(window, left, right)
    assert found.num_tokens == 2
    assert found.baseline == 9.0
    assert found.candidate == pytest.approx(14.0 * 9 / 14)


def test_texts_count_by_their_tokens() -> None:
    scores = [WindowScore("a", 10, 10.0, 20.0), WindowScore("b", 30, 60.0, 60.0)]
    whole, first, second = summarize(scores)
    assert (whole.name, first.name, second.name) == ("all texts", "a", "b")
    assert whole.perplexity_baseline == pytest.approx(exp(70 / 40))
    assert whole.perplexity_candidate == pytest.approx(exp(80 / 40))
    assert whole.difference.mean == pytest.approx(0.25)
    assert first.difference.mean == 1.0
    assert whole.divergence is None
    assert whole.same_top is None

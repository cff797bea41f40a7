"""Prompts have the wanted length by the server's own count, and no two begin alike."""

from random import Random

import pytest

from kvota.tools.load.prompts import (
    SAMPLE_PIECES,
    Estimated,
    TokenIds,
    Words,
    estimated,
    one_token_words,
)


async def words_and_template(text: str) -> int:
    """A tokenizer of words, with a template of three tokens around."""
    return 3 + len(text.split(" "))


async def characters(text: str) -> int:
    return len(text)


async def pairs_of_letters(text: str) -> int:
    """One token for every two characters: nothing is a token of its own."""
    return -(-len(text) // 2)


@pytest.mark.parametrize("count", [words_and_template, characters])
async def test_words_of_one_token_make_any_length(count: object) -> None:
    assert callable(count)
    words = await one_token_words(count)
    assert words is not None
    chance = Random(1)
    for wanted in (12, 100, 1531):
        assert await count(words.make(wanted, chance)) == wanted


async def test_where_no_word_is_one_token_there_are_none() -> None:
    assert await one_token_words(pairs_of_letters) is None


async def test_words_that_merge_when_they_stand_together_are_not_trusted() -> None:
    async def merging(text: str) -> int:
        return 1 + text.count(" ") + (text.count(" ") >= SAMPLE_PIECES) * 5 + len(text) * 2

    assert await one_token_words(merging) is None


def test_prompts_differ_from_their_first_tokens_on() -> None:
    ids = TokenIds(range(300, 400))
    chance = Random(2)
    prompts = [ids.make(64, chance) for _ in range(500)]
    assert all(len(prompt) == 64 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 500
    words = Words([" a", " b", " c", " d", " e", " f", " g", " h"], overhead=1)
    texts = {words.make(32, chance)[:32] for _ in range(500)}
    assert len(texts) == 500


def test_an_estimate_comes_from_two_counts_and_says_so() -> None:
    prompts = estimated((20, 36), (120, 186))
    assert (prompts.tokens_per_word, prompts.overhead) == (1.5, 6.0)
    assert "1.50 tokens a word" in prompts.how
    assert len(prompts.make(156, Random(1)).split()) == 100


@pytest.mark.parametrize("many", [(120, None), (120, 36)])
def test_a_server_that_counts_nothing_is_guessed(many: tuple[int, int | None]) -> None:
    prompts = estimated((20, 36), many)
    assert prompts == Estimated(1.3, 0.0, prompts.how)
    assert not prompts.is_exact

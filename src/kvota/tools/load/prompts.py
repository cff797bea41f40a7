"""Texts of a wanted length in tokens, no two alike, so that no prefix cache answers them.

TokenIds    ids of the server's own tokenizer; exact, where /v1/completions takes ids
Words       words that are one token each, counted by the server's /tokenize; exact
Estimated   words, by the mean tokens a word has; where the server counts for nobody
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

_TEXT: Final = (
    " the of and to in is you that it he was for on are as with his they at be this have from or"
    " one had by word but not what all were we when your can said there use an each which she do"
    " how their if will up other about out many then them these so some her would make like him"
    " into time has look two more write go see number no way could people my than first water been"
    " call who oil its now find long down day did get come made may part"
)
WORDS: Final = _TEXT.split()
# Where words are many tokens, single characters are one each.
PIECES: Final = tuple(f" {word}" for word in WORDS) + tuple("abcdefghijklmnopqrstuvwxyz")
START: Final = "Once"
SAMPLE_PIECES = 200
PIECES_MIN = 8  # fewer would make prompts alike
TOKENS_PER_WORD = 1.3  # of English, in the tokenizers of today; used only where nobody counts

Count = Callable[[str], Awaitable[int]]
"""The prompt tokens of a text, as the server will count them in a request."""


class Prompts(Protocol):
    """Makes prompts. `how` says in a few words how exact their lengths are."""

    @property
    def how(self) -> str: ...

    @property
    def is_exact(self) -> bool: ...

    def make(self, num_tokens: int, chance: Random) -> str | list[int]: ...


@dataclass(frozen=True, slots=True)
class TokenIds:
    ids: Sequence[int]
    how: str = "exact: token ids of the server's tokenizer"
    is_exact: bool = True

    def make(self, num_tokens: int, chance: Random) -> list[int]:
        return chance.choices(self.ids, k=num_tokens)


@dataclass(frozen=True, slots=True)
class Words:
    """`overhead`: tokens of a prompt without any piece, template included."""

    pieces: Sequence[str]
    overhead: int
    how: str = "exact: one-token words, counted by the server's /tokenize"
    is_exact: bool = True

    def make(self, num_tokens: int, chance: Random) -> str:
        return START + "".join(chance.choices(self.pieces, k=max(1, num_tokens - self.overhead)))


@dataclass(frozen=True, slots=True)
class Estimated:
    tokens_per_word: float
    overhead: float
    how: str
    is_exact: bool = False

    def make(self, num_tokens: int, chance: Random) -> str:
        num_words = max(1, round((num_tokens - self.overhead) / self.tokens_per_word))
        return " ".join(chance.choices(WORDS, k=num_words))


async def one_token_words(count: Count) -> Words | None:
    """Words that add exactly one token each, checked together; None where there are too few."""
    overhead = await count(START)
    pieces = [piece for piece in PIECES if await count(START + 2 * piece) == overhead + 2]
    # Letters behind letters may merge; words do not. Prefer words where there are enough.
    words = [piece for piece in pieces if piece.startswith(" ")]
    for chosen in (words, pieces):
        if len(chosen) < PIECES_MIN:
            continue
        text = START + "".join(Random(5).choices(chosen, k=SAMPLE_PIECES))
        if await count(text) == overhead + SAMPLE_PIECES:
            return Words(chosen, overhead)
    return None


def estimated(few: tuple[int, int | None], many: tuple[int, int | None]) -> Estimated:
    """From two probes, each (words, prompt tokens as the server's usage says)."""
    if few[1] is None or many[1] is None or many[1] <= few[1]:
        how = f"estimated: {TOKENS_PER_WORD} tokens a word; the server counts nothing"
        return Estimated(TOKENS_PER_WORD, 0.0, how)
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    overhead = few[1] - per_word * few[0]
    how = f"estimated: {per_word:.2f} tokens a word, from the usage of two requests"
    return Estimated(per_word, overhead, how)

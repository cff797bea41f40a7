"""Tokens that a sequence may say next, looked up in what was said before.

Text repeats itself: code that is edited, a quotation, a table, a loop. So what followed the last
two tokens where they stood before is a fair guess at what follows them now (prompt lookup
decoding, Saxena 2023):

    tokens    … the  cat  sat  on  …  the  cat │ sat  on          speculated
                                      └ as before ┘

A step that computes guesses beside the last token draws after each of them, and what is drawn is
kept as long as it is what was guessed: one step, several tokens, and the text is the same to the
last one (speculative decoding, Leviathan et al., arXiv 2211.17192, but by equality: draws here do
not depend on luck).

It costs rows, and a step costs about as much as `FIXED_ROWS` rows and those that it has. With B
sequences in it one more row that is right with chance p gains if

    (B + p) / (FIXED_ROWS + B + 1)  >  B / (FIXED_ROWS + B)      ⇔      p > B / (FIXED_ROWS + B)

so little is asked of a guess while one sequence runs alone, and nearly certainty of a guess in a
full batch. A guess takes no KV block and only what prompts leave of a step, and there is none while
anyone waits.
"""

from dataclasses import dataclass, field
from typing import Final

FIXED_ROWS: Final = 16  # SmolLM2-135M in int8 on 2 cores: 9 ms, and 0.57 for each row
_FIRST_CHANCE: Final = 0.5
_MEMORY: Final = 8  # lookups until what they taught has faded to a third

Bigram = tuple[int, int]


def chance_needed(num_sequences: int) -> float:
    """How likely a guess must be right to gain anything in a step of so many sequences."""
    return num_sequences / (FIXED_ROWS + num_sequences)


@dataclass(slots=True)
class PromptLookup:
    """What one sequence has said, by bigrams. Everything in it follows from the tokens alone."""

    num_prompt: int
    chance: float = _FIRST_CHANCE  # that what is looked up is what comes
    _places: dict[Bigram, int] = field(default_factory=dict)  # → where its latest successor stands
    _num_read: int = 2

    def guesses(self, tokens: list[int], *, most: int, chance_min: float) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `tokens`, which has only grown since the last call.

        As many as are all right with a chance of at least `chance_min`. Reads what is new of
        `tokens`, and learns from it how often the lookup would have been right.
        """
        self._read(tokens)
        count = self._num_promising(most, chance_min)
        if not count or len(tokens) < 2:
            return ()
        place = self._places.get((tokens[-2], tokens[-1]))
        if place is None:
            return ()
        period = len(tokens) - place  # beyond its own end it goes on as it began
        return tuple(tokens[place + step % period] for step in range(count))

    def _read(self, tokens: list[int]) -> None:
        places = self._places
        for place in range(self._num_read, len(tokens)):
            bigram = (tokens[place - 2], tokens[place - 1])
            before = places.get(bigram)
            if before is not None and place >= self.num_prompt:
                was_right = tokens[before] == tokens[place]
                self.chance += (was_right - self.chance) / _MEMORY
            places[bigram] = place
        self._num_read = max(self._num_read, len(tokens))

    def _num_promising(self, most: int, chance_min: float) -> int:
        """The largest count up to `most` whose guesses are all right with `chance_min`."""
        count, chance = 0, self.chance
        while count < most and chance >= chance_min:
            count += 1
            chance *= self.chance
        return count

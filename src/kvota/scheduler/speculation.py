"""Tokens that a sequence may say next, looked up in what was said before.

Text repeats itself: code that is edited, a quotation, a table, a loop. So what followed the last
two tokens where they stood before is a fair guess at what follows them now (prompt lookup
decoding, Saxena 2023):

    tokens    … the  cat  sat  on  …  the  cat │ sat  on          speculated
                      └─ next            └─ agreed: 2 tokens before both are the same

A step that computes guesses beside the last token draws after each of them, and what is drawn is
kept as long as it is what was guessed: one step, several tokens, and the text is the same to the
last one (speculative decoding, Leviathan et al., arXiv 2211.17192, but by equality: draws here do
not depend on luck).

It costs rows, and a step costs about as much as `FIXED_ROWS` rows and those that it has. With B
sequences in it one more row that is right with chance p gains if

    (B + p) / (FIXED_ROWS + B + 1)  >  B / (FIXED_ROWS + B)      ⇔      p > B / (FIXED_ROWS + B)

so little is asked of a guess while one sequence runs alone, and nearly certainty of a guess in a
full batch. How likely a guess is right hangs on how much of the text before it agrees: of what a
small model said on its own, 7 to 8 in 10 where two or three tokens do, 95 in 100 from eight on, and
nearly all from 32 on. The scheduler learns it as it goes, from every lookup of every sequence.

A guess takes no KV block and only what prompts leave of a step, and there is none while anyone
waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

FIXED_ROWS: Final = 16  # SmolLM2-135M in int8 on 2 cores: 9 ms, and 0.57 for each row
_FIRST_CHANCE: Final = 0.5
_MEMORY: Final = 64  # lookups until what they taught has faded to a third
_AGREED_MAX: Final = 32  # tokens; more that agree say no more

Bigram = tuple[int, int]


def chance_needed(num_sequences: int) -> float:
    """How likely a guess must be right to gain anything in a step of so many sequences."""
    return num_sequences / (FIXED_ROWS + num_sequences)


class LookupRecord:
    """How often lookups were right, by how many tokens agreed: 2 or 3, 4 to 7, 8 to 15, …"""

    def __init__(self) -> None:
        num_classes = _AGREED_MAX.bit_length() + 1
        self._chances = [_FIRST_CHANCE] * num_classes
        self._counts = [0] * num_classes

    def chance(self, agreed: int) -> float:
        """That a token is right which followed where the `agreed` before it were the same."""
        return self._chances[min(agreed, _AGREED_MAX).bit_length()]

    def learn(self, agreed: int, *, was_right: bool) -> None:
        number = min(agreed, _AGREED_MAX).bit_length()
        self._counts[number] += 1
        weight = 1 / min(_MEMORY, 2 + self._counts[number])
        self._chances[number] += weight * (was_right - self._chances[number])


class PromptPlaces:
    """Of a prompt: where what followed each two tokens last stands. Read when first asked, and
    once for all choices of a request: a long prompt takes some 0.1 s and 20 MB."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.num_prompt = len(prompt)
        self._prompt = prompt
        self._places: dict[Bigram, int] | None = None

    def after(self, bigram: Bigram) -> int | None:
        places = self._places
        if places is None:
            pairs = zip(self._prompt, self._prompt[1:-1], strict=False)
            places = self._places = {pair: place for place, pair in enumerate(pairs, 2)}
        return places.get(bigram)


@dataclass(slots=True)
class PromptLookup:
    """What one sequence has said, by bigrams.

    Where a lookup was right it goes on: no later place can have more in common with the end.
    """

    _in_prompt: PromptPlaces
    _places: dict[Bigram, int] = field(default_factory=dict)  # the same of its output
    _num_read: int = 0
    _next: int | None = None  # where the token stands that may come next
    _agreed: int = 0  # tokens before it that are those before the end

    def guesses(
        self, tokens: list[int], record: LookupRecord, *, most: int, chance_min: float
    ) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `tokens`, which has only grown since the last call.

        As many as are all right with a chance of at least `chance_min`. Reads what is new of
        `tokens`, and tells `record` whether what was looked up came.
        """
        self._read(tokens, record)
        if self._next is None:
            return ()
        count, chance = 0, record.chance(self._agreed)
        while count < most and chance >= chance_min:
            count += 1
            chance *= record.chance(self._agreed + count)
        place, period = self._next, len(tokens) - self._next
        return tuple(tokens[place + step % period] for step in range(count))  # on as it began

    def _read(self, tokens: list[int], record: LookupRecord) -> None:
        if not self._num_read:
            self._num_read = max(2, self._in_prompt.num_prompt)
            self._look_up(tokens, self._num_read)
        for place in range(self._num_read, len(tokens)):
            if self._next is not None:
                was_right = tokens[self._next] == tokens[place]
                record.learn(self._agreed, was_right=was_right)
                self._next = self._next + 1 if was_right else None
                self._agreed += was_right
            self._places[tokens[place - 2], tokens[place - 1]] = place
            if self._next is None:
                self._look_up(tokens, place + 1)
        self._num_read = max(self._num_read, len(tokens))

    def _look_up(self, tokens: list[int], end: int) -> None:
        if len(tokens) < end:
            return  # a prompt of one token: there are no two yet
        bigram = tokens[end - 2], tokens[end - 1]
        place = self._places.get(bigram)
        if place is None:
            place = self._in_prompt.after(bigram)
        if place is not None:
            self._next, self._agreed = place, _num_agreeing(tokens, place, end)


def _num_agreeing(tokens: list[int], place: int, end: int) -> int:
    """How many tokens before `place`, up to `_AGREED_MAX`, are those before `end`."""
    most = min(place, _AGREED_MAX)
    for back in range(1, most + 1):
        if tokens[place - back] != tokens[end - back]:
            return back - 1
    return most

"""From tokens to text that may be shown.

Two things hold text back. A character can be spread over several tokens, so bytes wait until they
are whole. And a stop string can begin in one token and end three tokens later, so any tail that
could still become a stop string waits until it is one or cannot be one any more:

    stop = "<<END>>"      tokens   say·   <<   EN   D>   >
                          shown    say·   ―    ―    ―    (matched: nothing more is shown)

What was shown is never taken back, and the shown pieces joined are exactly the final text.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of a tokenizer: the bytes of every token, and which ones to hide.

    `pieces[token]` are the bytes that the token adds to running text. Tokens at or past the end
    of `pieces` add nothing.
    """

    pieces: Sequence[bytes]
    special_ids: frozenset[int] = frozenset()


class TextStream:
    """The text of one sequence, growing by one token at a time."""

    __slots__ = ("_decoder", "_held", "_hidden", "_include_stop", "_pieces", "_stops")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        hide_special: bool = True,
    ) -> None:
        self._pieces = vocabulary.pieces
        self._hidden = vocabulary.special_ids if hide_special else frozenset()
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._decoder = _new_decoder("replace")
        self._held = ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token. Returns the text that may now be shown, and the stop string it completed.

        With `may_stop` False stop strings are not looked for, and none can begin here.
        After a stop string was returned nothing may be pushed any more.
        """
        if token in self._hidden or token >= len(self._pieces):
            return "", None
        text = self._decoder.decode(self._pieces[token])
        if not self._stops:
            return text, None
        text = self._held + text
        if not may_stop:
            self._held = ""
            return text, None
        return self._cut(text)

    def flush(self) -> str:
        """The end: what was held back for a stop string. Half a character is dropped."""
        held, self._held = self._held, ""
        self._decoder.reset()
        return held

    def _cut(self, text: str) -> tuple[str, str | None]:
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[: at + len(stop)] if self._include_stop else text[:at], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

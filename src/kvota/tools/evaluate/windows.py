"""Texts cut into windows, each read by both servers from its own beginning.

Where both tokenizers agree on every text, a window is the same token ids on both sides, and
everything can be compared token by token. Where they do not, or cannot be asked, a window is a
piece of text, and only the likelihood of the text as a whole can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvota.tools.evaluate.served import Served
from kvota.tools.evaluate.texts import Text

BYTES_PER_TOKEN = 3  # of mixed text, for windows that are cut without a tokenizer
PROBE = "a"  # any text


@dataclass(frozen=True, slots=True)
class Window:
    """A prompt of a text. Of ids, the first `num_prefix` are what the model wants before a text."""

    text: str
    prompt: Sequence[int] | str
    num_prefix: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """`reason` says why windows are not token ids; None: they are."""

    windows: Sequence[Window]
    reason: str | None

    @property
    def is_tokens(self) -> bool:
        return self.reason is None


async def cut(texts: Sequence[Text], both: tuple[Served, Served], size: int) -> Cut:
    """Windows of `size` tokens, or of text about as long. Raises ServerUnusable."""
    windows: list[Window] = []
    prefix, reason = await _common_prefix(both)
    for text in texts if reason is None else ():
        ids = await _common_ids(text.body, both)
        if ids is None:
            reason = f"the two tokenizers read the {text.name} text differently"
            break
        windows += [Window(text.name, [*prefix, *ids[at : at + size]], len(prefix))
                    for at in range(0, len(ids), size)]  # fmt: skip
    if reason is not None:
        windows = [
            Window(text.name, piece)
            for text in texts
            for piece in cut_text(text.body, size * BYTES_PER_TOKEN)
        ]
    return Cut([one for one in windows if len(one.prompt) > 1], reason)


async def _common_prefix(both: tuple[Served, Served]) -> tuple[list[int], str | None]:
    """What both put before a text (a BOS token, say), or why that is not the same."""
    found = []
    for one in both:
        whole = await one.tokens(PROBE, special=True)
        plain = await one.tokens(PROBE, special=False)
        if whole is None or plain is None:
            return [], f"{one.url} has no /tokenize"
        at = _index(whole, plain)
        found.append(whole[:at])
    if found[0] != found[1]:
        return [], "the two put different tokens before a text"
    return found[0], None


def _index(whole: Sequence[int], part: Sequence[int]) -> int:
    for at in range(len(whole) - len(part) + 1):
        if whole[at : at + len(part)] == part:
            return at
    return 0


async def _common_ids(text: str, both: tuple[Served, Served]) -> list[int] | None:
    first, second = [await one.tokens(text, special=False) for one in both]
    return first if first == second else None


def cut_text(body: str, num_bytes: int) -> list[str]:
    """Pieces of at least so many bytes (but the last), each ending with a line or a sentence."""
    pieces, piece = [], ""
    for part in _parts(body):
        piece += part
        if len(piece.encode()) >= num_bytes:
            pieces.append(piece)
            piece = ""
    return [*pieces, piece] if piece.strip() else pieces


def _parts(body: str) -> list[str]:
    parts, part = [], ""
    for at, letter in enumerate(body):
        part += letter
        ends = letter in "\n。！？" or (letter in ".!?" and body[at + 1 : at + 2] == " ")
        if ends:
            parts.append(part)
            part = ""
    return [*parts, part]

"""Chunks that differ from an earlier one in nothing but their text, told apart without decoding.

    {"id":"x", … "choices":[{"index":0,"delta":{"content":"  ← head, text, tail →  "}}]}

Most chunks of a stream are like that. One of them is decoded and looked at; of each that begins and
ends with the same bytes everything is known but the text, and that is taken as it stands. Anything
else, an escape inside the text included, is for the decoder.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import msgspec

_TEXT: Final = re.compile(rb'"(?:content|text)" ?: ?"([^"\\\x00-\x1f]+)"')
_PLAIN: Final = re.compile(rb'[^"\\\x00-\x1f]+')
_NOT_PLAIN: Final = bytes([*range(32), *b'"\\'])
_BETWEEN: Final = b"\n"  # no part of a plain text
_ENDING: Final = re.compile(rb'"finish_reason" ?: ?"')
_NUM_LOOKS_MAX: Final = 4  # a stream whose chunks are never alike is not looked at for ever


class Likeness:
    """Of one stream."""

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._num_head = self._num_tail = 0  # bytes
        self._num_looks = 0
        self.is_known = False  # a chunk has been learned
        self.choice = 0  # that the chunks speak of
        self.field = ""  # the name of their text

    def learn(self, value: bytes) -> bool:
        """Take a chunk, which has been decoded without complaint, for the pattern; if it can be.

        It can if it says one text of one choice, and nothing else that adds up over chunks.
        """
        if self._num_looks >= _NUM_LOOKS_MAX or _ENDING.search(value) is not None:
            return False
        self._num_looks += 1
        found = list(_TEXT.finditer(value))
        if len(found) != 1:
            return False
        begin, end = found[0].span(1)
        head, tail = value[:begin], value[end:]
        longer = found[0][1] + b"~"  # shows that these very bytes are the text, and no others
        simple = _only_text(head + longer + tail)
        if simple is None or simple[2] != longer.decode():
            return False
        self.choice, self.field, _ = simple
        self._head, self._tail = head, tail
        self._num_head, self._num_tail = len(head), len(tail)
        self.is_known = True
        return True

    def text(self, value: bytes) -> str | None:
        """The text of a chunk like the one learned; None: decode it."""
        begin, end = self._num_head, len(value) - self._num_tail
        if not (0 < begin < end and value.startswith(self._head) and value.endswith(self._tail)):
            return None
        if _PLAIN.fullmatch(value, begin, end) is None:
            return None
        try:
            return value[begin:end].decode()
        except UnicodeDecodeError:
            return None

    def texts(self, values: Sequence[bytes], at: int) -> list[str]:
        """The texts of as many chunks from `at` on as are like the one learned, all in one look."""
        head, tail, begin, num_tail = self._head, self._tail, self._num_head, self._num_tail
        found: list[bytes] = []
        for value in islice(values, at, None):
            if not (value.startswith(head) and value.endswith(tail)):
                break
            found.append(value[begin:-num_tail])  # empty where the two overlap
        if not found:
            return []
        together = _BETWEEN.join(found)
        num_not_plain = len(together) - len(together.translate(None, _NOT_PLAIN))
        if num_not_plain != len(found) - 1 or b"" in found:
            return self._texts_one_by_one(values, at)
        try:
            return together.decode().split(_BETWEEN.decode())
        except UnicodeDecodeError:
            return self._texts_one_by_one(values, at)

    def _texts_one_by_one(self, values: Sequence[bytes], at: int) -> list[str]:
        """The same where one of them may be for the decoder."""
        found: list[str] = []
        for value in islice(values, at, None):
            text = self.text(value)
            if text is None:
                break
            found.append(text)
        return found


def _only_text(value: bytes) -> tuple[int, str, str] | None:
    """Choice, field and text of a chunk of which no other part adds up over chunks."""
    try:
        chunk: dict[str, Any] = msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # in what nobody looks at
    choices = chunk.pop("choices", None)
    if not (isinstance(choices, list) and len(choices) == 1 and _is_flat(chunk)):
        return None
    if chunk.get("usage") is not None or chunk.get("error") is not None:
        return None
    part = choices[0]
    index, delta = part.pop("index", 0), part.pop("delta", None)
    holder, field = (part, "text") if delta is None else (delta, "content")
    text = holder.pop(field, None)
    if delta is not None and isinstance(delta.get("role"), str):
        del delta["role"]
    others = {*map(type, part.values()), *map(type, (delta or {}).values())}
    if not isinstance(text, str) or others - {type(None)}:
        return None
    return index, field, text


def _is_flat(fields: dict[str, Any]) -> bool:
    return {dict, list}.isdisjoint(map(type, fields.values()))

"""What a client may put into `input`, as token ids that the encoder takes."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvota.core.errors import ContextLengthExceeded, InvalidRequest
from kvota.wire.checks import check_token_ids
from kvota.wire.embeddings import NUM_INPUTS_MAX, TokenIds

Encode = Callable[[str], list[int]]


def inputs_of(given: str | list[Any] | None) -> Sequence[str | list[int]]:
    """The inputs one by one. Raises InvalidRequest naming `input`."""
    if given is None or given == []:
        raise InvalidRequest("`input` is missing or empty.", param="input")
    if isinstance(given, str):
        return [given]
    if len(given) > NUM_INPUTS_MAX:
        raise InvalidRequest(
            f"`input` has {len(given)} entries; the limit is {NUM_INPUTS_MAX}.", param="input"
        )
    if all(isinstance(one, str) for one in given):
        return given
    rows = [given] if all(_is_number(one) for one in given) else given
    try:
        return msgspec.convert(rows, list[TokenIds])
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"`input` must be a text, texts, token ids, or lists of token ids: {error}.",
            param="input",
        ) from None


def token_ids(
    inputs: Sequence[str | list[int]], encode: Encode, *, vocab_size: int, max_len: int
) -> list[Sequence[int]]:
    """Token ids of every input. Raises InvalidRequest, ContextLengthExceeded with the numbers.

    Nothing is cut to fit: half a text has another meaning.
    """
    found: list[Sequence[int]] = []
    for number, one in enumerate(inputs):
        if isinstance(one, str):
            if not one:
                raise InvalidRequest(f"`input[{number}]` is empty.", param="input")
            ids = encode(one)
        else:
            ids = one
            check_token_ids(ids, vocab_size, "input")
        if len(ids) > max_len:
            raise ContextLengthExceeded(
                f"`input[{number}]` has {len(ids)} tokens; the model takes {max_len} at most.",
                param="input",
            )
        found.append(ids)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""What a client has put into `input`, as token ids that the encoder takes."""

from collections.abc import Callable, Sequence

from kvota.core.errors import ContextLengthExceeded, InvalidRequest
from kvota.wire.checks import check_token_ids

Encode = Callable[[str], list[int]]


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

"""Walks a grammar token by token, as the sampler does."""

from collections.abc import Sequence

import numpy as np

from kvota.core.request import Constraint


def allowed_tokens(constraint: Constraint, vocab_size: int) -> list[int]:
    row = np.zeros((vocab_size + 31) // 32, np.int32)
    constraint.write_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def is_allowed_whole(
    constraint: Constraint, text: str, pieces: Sequence[bytes], eos_id: int
) -> bool:
    """Whether the text may be all of the answer, written with the longest tokens allowed."""
    rest = text.encode()
    while rest:
        tokens = [t for t in allowed_tokens(constraint, len(pieces)) if pieces[t] and t != eos_id]
        fitting = [token for token in tokens if rest.startswith(pieces[token])]
        if not fitting:
            return False
        token = max(fitting, key=lambda token: len(pieces[token]))
        constraint.accept(token)
        rest = rest.removeprefix(pieces[token])
    return constraint.is_complete() or eos_id in allowed_tokens(constraint, len(pieces))

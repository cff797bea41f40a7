"""Prompts that are random, fixed, and never the same twice, so that no prefix cache can help."""

import random
from collections.abc import Sequence

# Ids below are special in the default model and its relatives.
FIRST_ORDINARY_ID = 300


def prompts(
    num_prompts: int, num_tokens: int, vocab_size: int, seed: object
) -> list[Sequence[int]]:
    """`num_prompts` prompts of exactly `num_tokens` ids; the same for the same `seed`."""
    chance = random.Random(repr(seed))
    return [
        [chance.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(num_tokens)]
        for _ in range(num_prompts)
    ]

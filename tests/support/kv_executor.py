"""An executor without a model, whose tokens depend on the KV that is really there.

It stores (token, position) per block and slot, and derives each next token by reading the whole
history back through the block table. A wrong block table, a missed copy, a stale prefix block or
a lost token therefore changes the output, or raises BrokenHistory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

from kvota.core.plan import (
    Capacity,
    Chunk,
    ChunkResult,
    Draw,
    Sampled,
    StepPlan,
    StepResult,
)
from kvota.core.request import Request, TokenLogprobs

VOCAB_SIZE = 97
Slot = tuple[int, int]  # (token, position)
Following = Callable[[Sequence[int], int, int], int]  # (history, seed, choice) → the next token


class BrokenHistory(AssertionError):
    """The plan points at KV that was never written for it."""


class InjectedFailure(RuntimeError):
    """`fail_next` was set: the step raises after spoiling everything that it might have written."""


def next_token(history: Sequence[int], seed: int, choice: int) -> int:
    """The token that follows `history`: any change anywhere in it changes the answer."""
    return crc32(repr((seed, choice, list(history))).encode()) % VOCAB_SIZE


def repeating_token(history: Sequence[int], seed: int, choice: int) -> int:
    """As if the model fell into loops: decided by the last two tokens, but for a rare surprise."""
    surprise = crc32(repr(list(history)).encode()) % 5 == 0
    return crc32(repr((seed, choice, list(history[-2:]), surprise)).encode()) % 7


def logprob_after(history: Sequence[int], token: int) -> TokenLogprobs:
    """A made-up log probability that depends on the whole history and the token."""
    return TokenLogprobs(token, -1 - crc32(repr((list(history), token)).encode()) % 1000 / 100)


def reference_tokens(request: Request, choice: int, following: Following = next_token) -> list[int]:
    """What `choice` of the request must produce, from its prompt and parameters alone."""
    history = list(request.prompt)
    for _ in range(request.max_tokens):
        history.append(following(history, request.sampling.seed, choice))
    return history[len(request.prompt) :]


def reference_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    """One entry for each prompt token but the first."""
    prompt = list(request.prompt)
    return [logprob_after(prompt[:end], prompt[end]) for end in range(1, len(prompt))]


class HashingExecutor:
    """Implements `kvota.core.plan.Executor` over `num_blocks` blocks of `block_size` slots."""

    def __init__(self, num_blocks: int, block_size: int, following: Following = next_token) -> None:
        self._following = following
        self.num_speculated = 0
        self.num_speculated_right = 0
        self.capacity = Capacity(num_blocks, block_size, bytes_per_block=block_size * 16)
        self.fail_next = False  # set by a test: the next step raises InjectedFailure
        self.num_steps = 0
        self.num_tokens = 0  # computed since the start
        self._blocks: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.fail_next:
            self.fail_next = False
            self._spoil(plan)
            raise InjectedFailure("the step was told to fail")
        for copy in plan.copies:
            self._blocks[copy.target] = self._blocks[copy.source].copy()
        written: set[Slot] = set()
        for chunk in plan.chunks:
            self._write(chunk, written)
        self.num_tokens += plan.num_tokens
        return StepResult([self._answer(chunk) for chunk in plan.chunks])

    def _places(self, chunk: Chunk) -> list[tuple[int, int]]:
        size = self.capacity.block_size
        num_tokens = len(chunk.token_ids) + len(chunk.speculated)
        positions = range(chunk.start, chunk.start + num_tokens)
        return [(chunk.block_table[p // size], p % size) for p in positions]

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        if not chunk.token_ids:
            raise BrokenHistory(f"sequence {chunk.sequence_id} has a chunk of nothing")
        tokens = (*chunk.token_ids, *chunk.speculated)
        for offset, place in enumerate(self._places(chunk)):
            if place in written:
                raise BrokenHistory(f"two chunks of one step write block {place[0]}")
            written.add(place)
            self._blocks[place[0]][place[1]] = (tokens[offset], chunk.start + offset)

    def _spoil(self, plan: StepPlan) -> None:
        size = self.capacity.block_size
        for copy in plan.copies:
            self._blocks[copy.target] = [None] * size
        for chunk in plan.chunks:
            for block, slot in self._places(chunk):
                self._blocks[block][slot] = None

    def _history(self, chunk: Chunk) -> list[int]:
        """All tokens up to the end of the chunk, as the KV has them."""
        size = self.capacity.block_size
        tokens: list[int] = []
        for position in range(chunk.start + len(chunk.token_ids)):
            slot = self._blocks[chunk.block_table[position // size]][position % size]
            if slot is None or slot[1] != position:
                raise BrokenHistory(
                    f"sequence {chunk.sequence_id} reads position {position}, finds {slot}"
                )
            tokens.append(slot[0])
        return tokens

    def _answer(self, chunk: Chunk) -> ChunkResult:
        history = self._history(chunk)
        if chunk.speculated:
            [draw] = chunk.draws
            return ChunkResult(self._run(history, draw, chunk.speculated))
        drawn = [self._sample(history, draw) for draw in chunk.draws]
        return ChunkResult(drawn, _prompt_logprobs(chunk, history))

    def _run(self, history: list[int], draw: Draw, speculated: Sequence[int]) -> list[Sampled]:
        """One token after the other, as long as they are what was speculated."""
        self.num_speculated += len(speculated)
        drawn = [self._sample(history, draw)]
        for guess in speculated:
            if drawn[-1].token != guess:
                break
            history = [*history, guess]
            drawn.append(self._sample(history, replace(draw, tokens=history)))
        self.num_speculated_right += len(drawn) - 1
        return drawn

    def _sample(self, history: list[int], draw: Draw) -> Sampled:
        if history != list(draw.tokens):
            raise BrokenHistory(f"KV holds {history}, the draw follows {list(draw.tokens)}")
        token = self._following(history, draw.params.seed, draw.choice)
        wants = draw.params.logprobs is not None
        return Sampled(token, logprob_after(history, token) if wants else None)


def _prompt_logprobs(chunk: Chunk, history: list[int]) -> list[TokenLogprobs]:
    if chunk.prompt_logprobs is None:
        return []
    following = [*chunk.token_ids[1:], *([] if chunk.next_token is None else [chunk.next_token])]
    return [
        logprob_after(history[: chunk.start + offset + 1], token)
        for offset, token in enumerate(following)
    ]

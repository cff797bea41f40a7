"""A model whose every token, delay and failure is in the test's hands, over KV that is checked.

    history, read back from KV ─▶ a row of logits ─▶ the product's own sampler ─▶ token
                                    ▲
                              play(draw), written by the test

Where the play is silent the stage babbles: printable characters that depend on the whole history,
so any neighbour that touches a request's KV changes its text. The product's sampler stands behind
it, so temperatures, seeds, biases, grammars and log probabilities are the real ones.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvota.core.plan import Chunk, ChunkResult, Draw, StepPlan, StepResult
from kvota.model.sampler import Sampler
from tests.support.kv_executor import HashingExecutor
from tests.support.tiny_tokenizer import FIRST_BYTE_ID, IM_END_ID, VOCAB_SIZE, tiny_tokenizer

Play = Callable[[Draw], int | None]
"""The next token of a draw; None lets the stage babble."""

Row = npt.NDArray[np.float32]
GATE_TIMEOUT_S = 60.0
_PRINTABLE = slice(FIRST_BYTE_ID + 32, FIRST_BYTE_ID + 127)
_CERTAIN = 200.0  # logits above all others


def babble(draw: Draw) -> None:
    """No text is prescribed."""


def says(*pieces: str | bytes | int, end: bool = True) -> Play:
    """Each piece is spelled byte by byte, an int is a token; then the end token or babble."""
    tokens = [token for piece in pieces for token in _tokens(piece)]
    if end:
        tokens.append(IM_END_ID)
    return emits(*tokens)


def emits(*tokens: int) -> Play:
    """These tokens in order, then babble."""

    def play(draw: Draw) -> int | None:
        at = len(draw.tokens) - draw.num_prompt
        return tokens[at] if at < len(tokens) else None

    return play


def by_prompt(plays: Mapping[str, Play], otherwise: Play = babble) -> Play:
    """The play whose key occurs in the prompt's text."""
    texts: dict[tuple[int, ...], str] = {}
    tokenizer = tiny_tokenizer()

    def play(draw: Draw) -> int | None:
        prompt = tuple(draw.tokens[: draw.num_prompt])
        if prompt not in texts:
            texts[prompt] = tokenizer.decode(list(prompt), skip_special_tokens=False)
        chosen = (plays[key] for key in plays if key in texts[prompt])
        return next(chosen, otherwise)(draw)

    return play


def _tokens(piece: str | bytes | int) -> Iterator[int]:
    if isinstance(piece, int):
        yield piece
        return
    for byte in piece.encode() if isinstance(piece, str) else piece:
        yield FIRST_BYTE_ID + byte


class Gate:
    """Steps pass while it is open; while it is closed each one needs a permit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._permits = 0
        self._num_waiting = 0

    def close(self) -> None:
        with self._changed:
            self._is_open, self._permits = False, 0

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def allow(self, num_steps: int) -> None:
        with self._changed:
            self._permits += num_steps
            self._changed.notify_all()

    def wait_for_step(self) -> None:
        """Return when a step stands at the closed gate and every permit has been used."""
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._num_waiting > 0 and self._permits == 0, GATE_TIMEOUT_S
            )
        assert met, "no step came to the gate"

    def pass_through(self) -> None:
        """The executor's side."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or self._permits > 0, GATE_TIMEOUT_S)
            self._num_waiting -= 1
            if not self._is_open:
                self._permits -= 1


class Stage(HashingExecutor):
    """Implements `kvota.core.plan.Executor`. A chunk with a token of `poison` raises."""

    def __init__(self, num_blocks: int = 256, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.gate = Gate()
        self.play: Play = babble
        self.poison: frozenset[int] = frozenset()
        self.step_s = 0.0  # what each step takes, where a test needs a slow model
        self.plans: list[StepPlan] = []
        self._sampler = Sampler(VOCAB_SIZE)

    def reset(self) -> None:
        """Back to babbling at full speed."""
        self.play, self.poison, self.step_s = babble, frozenset(), 0.0
        self.plans.clear()
        self.gate.open()

    @contextmanager
    def held(self) -> Iterator[Gate]:
        """The closed gate, for as long as the block runs."""
        self.gate.close()
        try:
            yield self.gate
        finally:
            self.gate.open()

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.pass_through()
        self.plans.append(plan)
        if self.step_s:
            time.sleep(self.step_s)
        if any(self.poison.intersection(chunk.token_ids) for chunk in plan.chunks):
            raise RuntimeError("a poisoned token")
        return super().execute(plan)

    def _answer(self, chunk: Chunk) -> ChunkResult:
        history = self._history(chunk)
        rows = np.stack([self._row(history, draw) for draw in chunk.draws] or [_noise(history)])
        sampled = self._sampler.sample(rows, chunk.draws) if chunk.draws else []
        if chunk.prompt_logprobs is None:
            return ChunkResult(sampled)
        following = [*chunk.token_ids[1:]]
        following += [] if chunk.next_token is None else [chunk.next_token]
        before = [history[: chunk.start + 1 + offset] for offset in range(len(following))]
        if not following:
            return ChunkResult(sampled)
        noise = np.stack([_noise(part) for part in before])
        return ChunkResult(
            sampled, self._sampler.prompt_logprobs(noise, following, chunk.prompt_logprobs)
        )

    def _row(self, history: Sequence[int], draw: Draw) -> Row:
        row = _noise(history)
        token = self.play(draw)
        if token is not None:
            row[token] = _CERTAIN
        return row


def _noise(history: Sequence[int]) -> Row:
    """Logits that depend on every token so far; only printable characters have a chance."""
    seed = crc32(np.asarray(history, np.int64).tobytes())
    row = np.full(VOCAB_SIZE, -60.0, np.float32)
    width = _PRINTABLE.stop - _PRINTABLE.start
    row[_PRINTABLE] = 2.0 * np.random.RandomState(seed).standard_normal(width)
    return row

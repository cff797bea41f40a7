"""A step is data: what one forward pass has to do, and what came out of it.

    engine ── StepPlan ──▶ Executor ── StepResult ──▶ engine

A plan is a list of chunks. A chunk is "compute these tokens of that sequence": one token for a
sequence that decodes, many for one that still reads its prompt. There is no other difference
between the two, so a step mixes them freely:

    chunk A  [····················x]      one new token after 20 cached ones   sample
    chunk B  [········xxxxxxxx]           8 prompt tokens after 8 cached ones  (more to come)
    chunk C  [xxxxxxxxxxxx]               a whole prompt                       sample

A chunk may go on with tokens that nobody has drawn yet, speculated ones. Each is computed as if it
had been, and answers whether it was:

    chunk D  [····················x]g h i   drew g ✓, then h ✓, then k ✗ i      three tokens drawn

KV of position p of a sequence lives in block `block_table[p // block_size]`, slot
`p % block_size`. `copies` are whole-block copies to make before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvota.core.errors import KvotaError
from kvota.core.request import Constraint, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be sampled from the logits of a chunk's last position.

    The outcome depends on nothing but these fields and the logits, so a sequence gets the same
    token alone, in any batch, and again after a preemption.
    """

    params: SamplingParams
    choice: int  # index among the n choices of the request: part of the random key
    tokens: Sequence[int]  # prompt and output so far (a live view: read, never kept)
    num_prompt: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence in one step."""

    sequence_id: int
    token_ids: Sequence[int]
    start: int  # position of token_ids[0]
    block_table: Sequence[int]  # at least enough blocks for start + len(token_ids) positions
    draws: tuple[Draw, ...] = ()  # empty: more prompt follows; several: n choices of one prompt
    prompt_logprobs: int | None = None  # wanted for every token of the chunk, given the ones before
    next_token: int | None = None  # with prompt_logprobs: the prompt token after this chunk, if any
    # Positions from here on hold sampled tokens (recomputed ones). None: those of the draws do.
    num_prompt: int | None = None
    # With one draw: what may be drawn, and after that. Its KV is written behind that of the tokens.
    speculated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole KV block, all layers, before the step writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: Sequence[Chunk]
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        """All that the step computes, speculated ones too."""
        return sum(len(chunk.token_ids) + len(chunk.speculated) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The answer to one Draw. `error` is set when this draw alone failed.

    Its class says whose fault that is: the request's (its grammar broke) or the model's.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    error: KvotaError | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """`sampled` answers the chunk's draws in order.

    Where tokens were speculated, one draw has up to one answer more than those: the token drawn
    after the chunk, after the first speculated one if it is the same, and so on to the first that
    is another one, or the last. KV of the speculated tokens that were not drawn is void.

    With `prompt_logprobs`, `prompt_logprobs[i]` belongs to the prompt token at position
    `start + i + 1`; the chunk that ends the prompt has one entry fewer than tokens.
    """

    sampled: Sequence[Sampled] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    chunks: Sequence[ChunkResult]  # one per chunk of the plan, in its order


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV memory an executor has: `num_blocks` blocks of `block_size` tokens."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


class Executor(Protocol):
    """The only thing the engine knows of a model.

    `execute` may raise: then no chunk of the plan has a result, and KV written by it is void.
    """

    @property
    def capacity(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

"""One sequence of tokens that runs, and the group of them that answers one request.

The life cycle is this table and nothing else:

    WAITING ───▶ RUNNING ◀──▶ PREEMPTED        WAITING     in line, has never run
       │            │             │            RUNNING     holds KV blocks, is in every step
       └────────────┴──────┬──────┘            PREEMPTED   in line again, KV given up
                           ▼                   FINISHED    gone; nothing may follow
                        FINISHED

A sequence has `tokens` (prompt and output, one growing list) and `num_computed` of them in KV.
Reading a prompt, decoding, and recomputing after a preemption are the same thing: num_computed
catches up with the tokens.

A request that wants n choices starts as one sequence with n - 1 pending forks. When its prompt is
in KV the n first tokens are drawn from the same logits, and the forks become sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvota.core.plan import Draw
from kvota.core.request import Constraint, Request, TokenLogprobs
from kvota.kv.cache import BlockTable
from kvota.kv.prefix import Chain
from kvota.scheduler.block_meter import BlockMeter
from kvota.scheduler.speculation import PromptLookup, PromptPlaces


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A sequence was asked to take a step that its life cycle does not have."""

    def __init__(self, sequence_id: int, old: Status, new: Status) -> None:
        super().__init__(f"sequence {sequence_id} is {old.value} and cannot become {new.value}")


Rank = tuple[int, int, int]
"""(band, arrival, choice): smaller is served first and preempted last."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a request. Only the scheduler changes it; everyone may read it."""

    id: int
    group: "SequenceGroup"
    choice: int
    tokens: list[int]
    chain: Chain | None  # its name in the prefix cache; None: the request opted out
    draws: tuple[Draw, ...]  # what to sample once all tokens are computed; one per choice
    status: Status = Status.WAITING
    table: BlockTable | None = None  # present exactly while RUNNING
    num_pending_forks: int = 0
    num_tokens_at_start: int = 0  # len(tokens) when it last began to run
    num_cached_at_start: int = 0  # of those, already in KV then
    num_preemptions: int = 0
    num_given_up: int = 0  # tokens of KV lost in the last preemption
    planned_step: int = -1  # the last step that it had a chunk in
    lookup: PromptLookup = field(init=False)
    rank: Rank = field(init=False)

    def __post_init__(self) -> None:
        self.lookup = PromptLookup(self.group.prompt_places)
        self.rank = (self.group.request.band, self.group.arrival, self.choice)

    @property
    def num_prompt(self) -> int:
        return len(self.group.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.group.request.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens sampled so far (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def num_computed(self) -> int:
        return self.table.num_computed if self.table is not None else 0

    @property
    def num_to_read(self) -> int:
        """What it has or had to compute before it samples, since it last began to run."""
        return len(self.tokens) - self.num_cached_at_start

    @property
    def num_slots(self) -> int:
        """What it counts for against `max_running_requests`: itself and its pending forks."""
        return 1 + self.num_pending_forks

    @property
    def num_run_tokens(self) -> int:
        """Tokens sampled since it last began to run."""
        return len(self.tokens) - self.num_tokens_at_start

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the prompt's logprobs are complete: every position must be computed."""
        return self.group.request.prompt_logprobs is not None and not self.group.is_prompt_read

    def move(self, new: Status) -> None:
        """Follow the table, or raise IllegalTransition and change nothing."""
        if new not in TRANSITIONS[self.status]:
            raise IllegalTransition(self.id, self.status, new)
        self.status = new


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """The sequences of one request, and what they have in common."""

    request: Request
    arrival: int  # place in the order of arrival: 0, 1, 2…
    constraints: tuple[Constraint | None, ...]  # one per choice
    sequences: list[Sequence] = field(default_factory=list)  # grows to n when the prompt is read
    is_prompt_read: bool = False
    cached_tokens: int | None = None  # of the prompt, at the first admission
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt[1:], so far
    first_scheduled_s: float | None = None
    meter: BlockMeter = field(default_factory=BlockMeter)
    prompt_places: PromptPlaces = field(init=False)  # read once for all choices

    def __post_init__(self) -> None:
        self.prompt_places = PromptPlaces(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    @property
    def num_preemptions(self) -> int:
        return sum(sequence.num_preemptions for sequence in self.sequences)

    def let_go(self) -> None:
        """Nobody asks about it any more. It and its sequences hold each other, tokens and all, and
        the collector of such cycles counts objects, not megabytes: it may not look for hours.
        """
        self.sequences.clear()

    def count_blocks(self, now: float) -> None:
        """Its tables have changed. A block that several choices share counts once."""
        tables = [one.table.blocks for one in self.sequences if one.table is not None]
        num_blocks = len(tables[0]) if len(tables) == 1 else len(set().union(*tables))
        self.meter.hold(num_blocks, now)

    def new_draw(self, choice: int, tokens: list[int]) -> Draw:
        """What to sample for `choice`, whose live token list is `tokens`."""
        request = self.request
        return Draw(request.sampling, choice, tokens, len(request.prompt), self.constraints[choice])

"""The whole evaluation: find both versions, read the texts, continue the prompts, run the tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from kvota.core.errors import ConfigError, KvotaError
from kvota.tools.evaluate import gate
from kvota.tools.evaluate.agreement import Agreement, agreement
from kvota.tools.evaluate.answers import Continuation, Dialect
from kvota.tools.evaluate.gate import Check, Rules, Verdict
from kvota.tools.evaluate.likelihood import (
    Likelihood,
    WindowScore,
    compare_text,
    compare_tokens,
    summarize,
)
from kvota.tools.evaluate.served import Place, Served, open_served
from kvota.tools.evaluate.tasks import TaskOptions, TaskScore, compare, run_tasks, why_skipped
from kvota.tools.evaluate.texts import Text
from kvota.tools.evaluate.windows import Cut, Window, cut
from kvota.tools.load.bench import Watch

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is compared, and how hard the servers are asked."""

    texts: Sequence[Text]
    prompts: Sequence[str]
    rules: Rules = field(default_factory=Rules)
    tasks: TaskOptions = field(default_factory=TaskOptions)
    window: int = 128  # tokens
    top: int = 20  # likeliest tokens to ask for
    max_tokens: int = 48  # of a continuation
    concurrency: int = 4


@dataclass(frozen=True, slots=True)
class Side:
    """One version, and what its server could tell."""

    url: str
    model: str
    dialect: Dialect | None
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that was found. `likelihood` and `tasks` are empty where `no_…` says why."""

    baseline: Side
    candidate: Side
    options: Options
    likelihood: Sequence[Likelihood]
    no_likelihood: str
    not_by_token: str | None  # why only text-level measures were possible
    agreement: Agreement | None
    own_agreement: Agreement | None  # the baseline with itself
    tasks: Sequence[TaskScore]
    no_tasks: str | None
    checks: Sequence[Check]

    @property
    def verdict(self) -> Verdict:
        return gate.verdict_of(self.checks)


async def evaluate(baseline: Place, candidate: Place, options: Options, watch: Watch) -> Evaluation:
    """Raises ServerUnusable, and ConfigError for two places that are the same."""
    async with AsyncExitStack() as stack:
        watch.begin("looking at both", 2)
        both = []
        for place in (baseline, candidate):
            client = await stack.enter_async_context(place.client())
            both.append(await open_served(client, place, options.top))
            watch.advance()
        pair = (both[0], both[1])
        scores, cuts, no_likelihood = await _read(pair, options, watch)
        agreed, own = await _continue(pair, options, watch, has_same_tokens=cuts.is_tokens)
    places = [
        replace(place, model=one.model)
        for place, one in zip((baseline, candidate), pair, strict=True)
    ]
    tasks, no_tasks = await _run_tasks(places, options.tasks, watch)
    found = summarize(scores) if any(one.num_tokens for one in scores) else []
    checks = [
        *gate.likelihood_checks(options.rules, found, no_likelihood),
        *gate.agreement_checks(options.rules, agreed, own),
        *gate.task_checks(options.rules, tasks, no_tasks if options.tasks.tasks else None),
    ]
    before, after = (Side(one.url, one.model, one.dialect, one.top) for one in pair)
    return Evaluation(
        baseline=before,
        candidate=after,
        options=options,
        likelihood=found,
        no_likelihood=no_likelihood,
        not_by_token=cuts.reason,
        agreement=agreed,
        own_agreement=own,
        tasks=tasks,
        no_tasks=no_tasks,
        checks=checks,
    )


async def _read(
    both: tuple[Served, Served], options: Options, watch: Watch
) -> tuple[list[WindowScore], Cut, str]:
    """Scores of all windows, how they were cut, and why there are none."""
    size = min([options.window, *(one.max_model_len - 8 for one in both if one.max_model_len)])
    if size < 2:
        raise ConfigError("The window of one of the models is too small to read anything.")
    cuts = await cut(options.texts, both, size)
    for one in both:
        if one.dialect is None:
            return [], cuts, f"{one.url} tells no log probabilities of a prompt"
    scoring = compare_tokens if cuts.is_tokens else compare_text

    async def score(window: Window) -> WindowScore:
        left, right = await _both(both, lambda one: one.score(window.prompt))
        return scoring(window, left, right)

    return await _at_once(cuts.windows, score, options, watch, "reading texts"), cuts, ""


async def _continue(
    both: tuple[Served, Served], options: Options, watch: Watch, *, has_same_tokens: bool
) -> tuple[Agreement | None, Agreement | None]:
    """How far the two agree, and how far the baseline agrees with itself when asked again."""

    async def ask(prompt: str) -> tuple[Continuation, Continuation, Continuation]:
        left, right = await _both(both, lambda one: one.continued(prompt, options.max_tokens))
        return left, right, await both[0].continued(prompt, options.max_tokens)

    answers = await _at_once(options.prompts, ask, options, watch, "continuing prompts")
    left, right, again = ([one[side] for one in answers] for side in range(3))
    return (
        agreement(left, right, has_same_tokens=has_same_tokens),
        agreement(left, again, has_same_tokens=has_same_tokens),
    )


async def _run_tasks(
    places: Sequence[Place], options: TaskOptions, watch: Watch
) -> tuple[list[TaskScore], str | None]:
    if reason := why_skipped(options):
        return [], reason
    watch.begin("running tasks", len(places))
    results = []
    with TemporaryDirectory(prefix="kvota-evaluate-") as folder:
        for number, place in enumerate(places):
            results.append(await run_tasks(options, place, Path(folder) / str(number)))
            watch.advance()
    scores = compare(results[0], results[1])
    return scores, None if scores else "the two sides answered no question in common"


async def _both(both: tuple[Served, Served], ask: Callable[[Served], Awaitable[R]]) -> tuple[R, R]:
    left, right = await asyncio.gather(*(ask(one) for one in both))
    return left, right


async def _at_once(
    asked: Sequence[T],
    ask: Callable[[T], Awaitable[R]],
    options: Options,
    watch: Watch,
    what: str,
) -> list[R]:
    """All answers in order, a few at a time. The first error ends all."""
    room = asyncio.Semaphore(options.concurrency)
    watch.begin(what, len(asked))

    async def one(item: T) -> R:
        async with room:
            answer = await ask(item)
        watch.advance()
        return answer

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in asked]
    except* KvotaError as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first

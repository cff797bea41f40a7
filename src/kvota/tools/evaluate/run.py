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
from kvota.tools.load.cut import Cut as EarlyEnd
from kvota.tools.load.cut import kept_until_cut

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
    cut: EarlyEnd | None = None  # why it is not complete

    @property
    def verdict(self) -> Verdict:
        """Of a part nothing is concluded: it is not a fair choice of the whole."""
        return Verdict.UNDECIDED if self.cut is not None else gate.verdict_of(self.checks)


async def evaluate(baseline: Place, candidate: Place, options: Options, watch: Watch) -> Evaluation:
    """Raises ServerUnusable, and ConfigError for two places that are the same.

    Ctrl-C (a cancellation) and a server that is gone end it early, undecided, once anything is
    measured.
    """
    async with AsyncExitStack() as stack:
        places = (baseline, candidate)
        pair = await _open(stack, places, options, watch)
        found = _Found()
        with kept_until_cut() as end:
            await _read(pair, options, watch, found)
            await _continue(pair, options, watch, found)
            await _run_tasks(places, pair, options.tasks, watch, found)
        end.require(found.scores or found.answers)
    return _judged(pair, options, found, end.cut)


@dataclass(slots=True)
class _Found:
    """What was measured so far."""

    scores: list[WindowScore] = field(default_factory=list)
    no_scores: str = ""
    cuts: Cut | None = None
    answers: list[tuple[Continuation, Continuation, Continuation]] = field(default_factory=list)
    tasks: list[TaskScore] = field(default_factory=list)
    no_tasks: str | None = None


async def _open(
    stack: AsyncExitStack, places: tuple[Place, Place], options: Options, watch: Watch
) -> tuple[Served, Served]:
    watch.begin("looking at both", 2)
    both = []
    for place in places:
        client = await stack.enter_async_context(place.client())
        both.append(await open_served(client, place, options.top))
        watch.advance()
    return both[0], both[1]


def _judged(
    pair: tuple[Served, Served], options: Options, found: _Found, cut_short: EarlyEnd | None
) -> Evaluation:
    told = any(one.num_tokens for one in found.scores)
    likelihood = summarize(found.scores) if told else []
    no_likelihood = found.no_scores
    if cut_short is not None and not likelihood and not no_likelihood:
        no_likelihood = cut_short.reason
    agreed, own = _agreements(found)
    checks = [
        *gate.likelihood_checks(options.rules, likelihood, no_likelihood),
        *gate.agreement_checks(options.rules, agreed, own),
        *gate.task_checks(
            options.rules, found.tasks, found.no_tasks if options.tasks.tasks else None
        ),
    ]
    before, after = (Side(one.url, one.model, one.dialect, one.top) for one in pair)
    return Evaluation(
        baseline=before,
        candidate=after,
        options=options,
        likelihood=likelihood,
        no_likelihood=no_likelihood,
        not_by_token=found.cuts.reason if found.cuts is not None else None,
        agreement=agreed,
        own_agreement=own,
        tasks=found.tasks,
        no_tasks=found.no_tasks,
        checks=checks,
        cut=cut_short,
    )


async def _read(both: tuple[Served, Served], options: Options, watch: Watch, found: _Found) -> None:
    """Adds scores of all windows, how they were cut, and why there are none."""
    size = min([options.window, *(one.max_model_len - 8 for one in both if one.max_model_len)])
    if size < 2:
        raise ConfigError("The window of one of the models is too small to read anything.")
    found.cuts = cuts = await cut(options.texts, both, size)
    for one in both:
        if one.dialect is None:
            found.no_scores = f"{one.url} tells no log probabilities of a prompt"
            return
    scoring = compare_tokens if cuts.is_tokens else compare_text

    async def score(window: Window) -> WindowScore:
        left, right = await _both(both, lambda one: one.score(window.prompt))
        return scoring(window, left, right)

    await _at_once(cuts.windows, score, options, watch, "reading texts", found.scores)


async def _continue(
    both: tuple[Served, Served], options: Options, watch: Watch, found: _Found
) -> None:
    """Adds both answers to each prompt, and the baseline's when it is asked again."""

    async def ask(prompt: str) -> tuple[Continuation, Continuation, Continuation]:
        left, right = await _both(both, lambda one: one.continued(prompt, options.max_tokens))
        return left, right, await both[0].continued(prompt, options.max_tokens)

    await _at_once(options.prompts, ask, options, watch, "continuing prompts", found.answers)


def _agreements(found: _Found) -> tuple[Agreement | None, Agreement | None]:
    """How far the two agree, and how far the baseline agrees with itself."""
    if found.cuts is None:
        return None, None
    left, right, again = ([one[side] for one in found.answers] for side in range(3))
    is_tokens = found.cuts.is_tokens
    return (
        agreement(left, right, has_same_tokens=is_tokens),
        agreement(left, again, has_same_tokens=is_tokens),
    )


async def _run_tasks(
    places: tuple[Place, Place],
    pair: tuple[Served, Served],
    options: TaskOptions,
    watch: Watch,
    found: _Found,
) -> None:
    """Adds the scores of the tasks, or why there are none."""
    if reason := why_skipped(options):
        found.no_tasks = reason
        return
    found.no_tasks = "they were not run to their end"
    watch.begin("running tasks", len(places))
    results = []
    with TemporaryDirectory(prefix="kvota-evaluate-") as folder:
        for number, (place, served) in enumerate(zip(places, pair, strict=True)):
            named = replace(place, model=served.model)
            results.append(await run_tasks(options, named, Path(folder) / str(number)))
            watch.advance()
    found.tasks = compare(results[0], results[1])
    found.no_tasks = None if found.tasks else "the two sides answered no question in common"


async def _both(both: tuple[Served, Served], ask: Callable[[Served], Awaitable[R]]) -> tuple[R, R]:
    left, right = await asyncio.gather(*(ask(one) for one in both))
    return left, right


async def _at_once(
    asked: Sequence[T],
    ask: Callable[[T], Awaitable[R]],
    options: Options,
    watch: Watch,
    what: str,
    done: list[R],
) -> None:
    """Adds all answers in order, a few at a time; where it is cut, those until then.

    The first error ends all.
    """
    room = asyncio.Semaphore(options.concurrency)
    watch.begin(what, len(asked))
    answers: dict[int, R] = {}

    async def one(number: int, item: T) -> None:
        async with room:
            answers[number] = await ask(item)
        watch.advance()

    first: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for number, item in enumerate(asked):
                group.create_task(one(number, item))
    except* KvotaError as errors:
        first = errors.exceptions[0]
    finally:
        done.extend(answers[number] for number in sorted(answers))
    if first is not None:
        raise first

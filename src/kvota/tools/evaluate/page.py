"""What was found, as tables for the terminal, as a page and as JSON.

The JSON is what `result.py` reads again: `format`, `verdict`, `written_at_s`, both sides, every
check with its bounds, and all measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import expm1
from typing import Any, Final

from kvota import __version__
from kvota.tools.evaluate.agreement import Agreement
from kvota.tools.evaluate.gate import Check, Rules, Verdict
from kvota.tools.evaluate.likelihood import Likelihood
from kvota.tools.evaluate.run import Evaluation, Side
from kvota.tools.evaluate.texts import Text
from kvota.tools.report.charts import Bars, bar_chart
from kvota.tools.report.html import Report, Section, Table

FORMAT: Final = "kvota-evaluation/1"
ABSENT: Final = "–"
WORDS: Final[Mapping[Verdict, str]] = {
    Verdict.GOOD: "Good: the candidate is as good as the baseline, within what is allowed.",
    Verdict.WORSE: "Worse: the candidate is worse than what is allowed, beyond chance.",
    Verdict.UNDECIDED: "Undecided: what was measured cannot show that the candidate is good.",
}
BOUND: Final = (
    "The KL divergence KL(baseline ‖ candidate) is a lower bound: of each distribution the servers "
    "tell only the likeliest tokens, and all tokens that not both of them named count as one. "
    "“Seen” is the share of the baseline's probability on the tokens that both named."
)
GREEDY: Final = (
    "Greedy answers: how far the candidate's are the baseline's, token by token; “before” is how "
    "far the baseline's own are the same when it is asked twice."
)
PAIRED: Final = "Tasks: the share of right answers; ± is the error of the difference."
ERRORS: Final = (
    "± is one standard error, over windows of text, prompts or questions as the independent "
    "pieces, each of them taken by both sides. A check is failed only when its lower bound, at a "
    "one-sided confidence of 95 %, is above what is allowed, and passed only when its upper bound "
    "is within it. Single texts and tasks are judged at 1 − 5 % / their number, and only for being "
    "worse."
)


def verdict_text(found: Evaluation) -> str:
    """One or two sentences: the verdict, and the checks that made it."""
    if found.cut is not None:
        return f"Incomplete: {found.cut.reason}. {WORDS[found.verdict]}"
    reasons = [f"{one.name}: {one.reason}" for one in found.checks if one.verdict is found.verdict]
    if found.verdict is Verdict.GOOD:
        return WORDS[found.verdict]
    return f"{WORDS[found.verdict]} {'; '.join(reasons)}."


def likelihood_table(found: Evaluation) -> Table:
    """A line for each text, all texts first."""
    header = ("text", "tokens", "before", "after", "rise", "±", "KL ≥", "seen", "same top")
    return Table(header, [_likelihood_row(one) for one in _shown(found)])


def _shown(found: Evaluation) -> Sequence[Likelihood]:
    """A single text is not shown twice, as itself and as all texts."""
    return found.likelihood[1:] if len(found.likelihood) == 2 else found.likelihood


def _likelihood_row(one: Likelihood) -> list[str]:
    rise = expm1(one.difference.mean)
    return [
        one.name,
        f"{one.num_tokens:,}",
        f"{one.perplexity_baseline:.4g}",
        f"{one.perplexity_candidate:.4g}",
        f"{rise:+.2%}",
        f"{one.difference.error * (1 + rise):.2%}",  # the derivative of exp is exp
        ABSENT if one.divergence is None else f"{one.divergence.mean:.4f}",
        ABSENT if one.covered is None else f"{one.covered:.1%}",
        ABSENT if one.same_top is None else f"{one.same_top.mean:.1%}",
    ]


def answers_table(found: Evaluation) -> Table:
    """Agreement and tasks."""
    header = ("answers", "number", "before", "after", "±")
    return Table(header, [*_agreement_rows(found), *_task_rows(found)])


def _agreement_rows(found: Evaluation) -> list[list[str]]:
    agreed, own = found.agreement, found.own_agreement
    if agreed is None or own is None:
        return []
    unit = "tokens" if agreed.is_tokens else "characters"
    rows = (
        (f"same {unit} to first difference", own.until_first, agreed.until_first),
        (f"same {unit} in same place", own.overall, agreed.overall),
        ("same answers", own.whole, agreed.whole),
    )
    return [
        [name, str(agreed.num_prompts), f"{before.mean:.1%}", f"{now.mean:.1%}", f"{now.error:.1%}"]
        for name, before, now in rows
    ]


def _task_rows(found: Evaluation) -> list[list[str]]:
    return [
        [
            f"{one.task}: {one.metric}",
            f"{one.num_questions:,}",
            f"{one.baseline:.1%}",
            f"{one.candidate:.1%}",
            f"{one.drop.error:.1%}",
        ]
        for one in found.tasks
    ]


def checks_table(found: Evaluation) -> Table:
    header = ("check", "allowed", "measured", "bounds", "verdict")
    return Table(header, [_check_row(one) for one in found.checks])


def _check_row(one: Check) -> list[str]:
    figure = _nats if one.name.startswith("KL") else _percent
    bounds = ABSENT
    if one.low is not None and one.high is not None:
        bounds = f"{figure(one.low)} … {figure(one.high)}"
    measured = ABSENT if one.measured is None else figure(one.measured)
    return [one.name, f"≤ {figure(one.allowed)}", measured, bounds, one.verdict.value]


def _nats(value: float) -> str:
    return f"{value:.4f}"


def _percent(value: float) -> str:
    return f"{value:.2%}"


def notes(found: Evaluation) -> list[str]:
    """What could not be measured, and why."""
    said = []
    if found.no_likelihood:
        said.append(f"No perplexity and no KL: {found.no_likelihood}.")
    elif found.not_by_token:
        said.append(f"No KL, and perplexity over the same bytes of text: {found.not_by_token}.")
    if found.no_tasks:
        said.append(f"Tasks skipped: {found.no_tasks}.")
    return said


def facts(found: Evaluation, written_at: str) -> dict[str, str]:
    options = found.options
    return {
        "baseline": side_text(found.baseline),
        "candidate": side_text(found.candidate),
        "read": f"{_names(options.texts)} in windows of {options.window} tokens",
        "continued": f"{len(options.prompts)} prompts by up to {options.max_tokens} tokens",
        "allowed": _rules(options.rules),
        "when": written_at,
        "kvota": __version__,
    }


def _names(texts: Sequence[Text]) -> str:
    return ", ".join(one.name for one in texts)


def side_text(side: Side) -> str:
    how = "no log probabilities"
    if side.dialect is not None:
        how = f"{side.dialect.value}, {side.top} likeliest tokens"
    return f"{side.model} at {side.url} ({how})"


def _rules(rules: Rules) -> str:
    said = [f"{rules.max_drop:.1%} worse"]
    if rules.max_kl is not None:
        said.append(f"KL {rules.max_kl:g} nats")
    if rules.min_agreement is not None:
        said.append(f"greedy agreement {rules.min_agreement:.1%}")
    return ", ".join(said)


def report(found: Evaluation, written_at: str) -> Report:
    sections = [Section("Checks", ERRORS, checks_table(found))]
    if found.likelihood:
        text = BOUND if found.likelihood[0].divergence is not None else ""
        sections.append(Section("Texts", text, likelihood_table(found), _charts(found)))
    answers = answers_table(found)
    if answers.rows:
        text = f"{GREEDY} {PAIRED}"
        sections.append(Section("Answers", text, answers))
    if notes(found):
        sections.append(Section("Not measured", "\n\n".join(notes(found))))
    sections.append(Section("Sources", table=_sources(found)))
    return Report(
        f"{found.candidate.model} against {found.baseline.model}",
        facts(found, written_at),
        sections,
        verdict_text(found),
        found.verdict is not Verdict.GOOD,
    )


def _charts(found: Evaluation) -> list[str]:
    shown = _shown(found)
    names = [one.name for one in shown]
    rises = [100 * expm1(one.difference.mean) for one in shown]
    charts = [bar_chart(names, [Bars("rise", rises)], "rise of perplexity, %")]
    apart = [one.divergence.mean for one in shown if one.divergence is not None]
    if len(apart) == len(names):
        charts.append(bar_chart(names, [Bars("KL", apart)], "KL divergence, nats per token"))
    return charts


def _sources(found: Evaluation) -> Table:
    rows = [[one.name, one.licence or ABSENT, one.source] for one in found.options.texts]
    return Table(("text", "licence", "source"), rows)


def as_json(found: Evaluation, written_at_s: float) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "verdict": found.verdict.value,
        "reason": verdict_text(found),
        "incomplete": None if found.cut is None else found.cut.reason,
        "written_at_s": written_at_s,
        "kvota": __version__,
        "baseline": _side_json(found.baseline),
        "candidate": _side_json(found.candidate),
        "rules": asdict(found.options.rules),
        "checks": [asdict(one) for one in found.checks],
        "texts": [asdict(one) for one in found.likelihood],
        "agreement": _agreement_json(found.agreement),
        "baseline_with_itself": _agreement_json(found.own_agreement),
        "tasks": [asdict(one) for one in found.tasks],
        "notes": notes(found),
        "window": found.options.window,
        "max_tokens": found.options.max_tokens,
    }


def _side_json(side: Side) -> dict[str, Any]:
    dialect = side.dialect.value if side.dialect is not None else None
    return {"url": side.url, "model": side.model, "dialect": dialect, "top": side.top}


def _agreement_json(found: Agreement | None) -> dict[str, Any] | None:
    return asdict(found) if found is not None else None


def tables(found: Evaluation) -> Sequence[Table]:
    """For the terminal; those that have a line."""
    every = (likelihood_table(found), answers_table(found), checks_table(found))
    return [one for one in every if one.rows]

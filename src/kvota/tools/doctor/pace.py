"""Answers that begin too late or come too slowly, and which part of the work is to blame."""

from collections.abc import Iterable
from typing import Final

from kvota.tools.doctor import names
from kvota.tools.doctor.binding import binding
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Histogram, Window

ALONE: Final = 1.5  # a mean batch below this has no company to blame
UNEVEN: Final = 3.0  # a mean this many times the median: a few slow steps make the pace
# Prompt tokens read for each token written, above which prompts make the steps long. Chat traffic
# has 5 or 6 (Azure conversations, 2023: prompts of 1,155 and answers of 211 on average).
READS_MORE: Final = 8.0


def first_token(window: Window, targets: Targets) -> Iterable[Finding]:
    seen = window.histogram(*names.FIRST_TOKEN)
    if seen is None:
        yield from _nobody_begins(window, targets)
        return
    late = seen.share_above(targets.ttft_s)
    if late < targets.late_share:
        return
    queue = window.histogram(*names.QUEUE)
    said = f"{late:.0%} of first tokens later than {targets.ttft_s:g} s (mean {_s(seen.mean)})"
    if queue is None:
        yield _late(
            window, "first tokens are late", said, "the server does not say how long they queue", ""
        )
    elif queue.mean >= seen.mean / 2:
        limit = binding(window, targets)
        yield _late(
            window,
            "TTFT is queueing, not prefill",
            f"{said}; {_s(queue.mean)} of it in line",
            f"waiting for: {limit.said}",
            limit.change,
        )
    else:
        yield _late(
            window,
            "TTFT is prefill, not queueing",
            f"{said}; {_s(max(seen.mean - queue.mean, 0.0))} of it reading the prompt",
            _prompts(window, seen),
            "shorter prompts, or prompts that begin alike (prefix_cache); a larger "
            "max_num_batched_tokens reads faster and lengthens the gaps between tokens",
        )


def _late(window: Window, name: str, said: str, means: str, change: str) -> Finding:
    return Finding(
        name=name,
        level=Level.PROBLEM,
        said=said,
        means=means,
        change=change,
        source=", ".join(
            filter(None, (window.named(*names.FIRST_TOKEN), window.named(*names.QUEUE)))
        ),
    )


def _nobody_begins(window: Window, targets: Targets) -> Iterable[Finding]:
    """No first token in the whole time, though requests wait for one: the oldest says how long."""
    if not window.live:
        return
    waiting = [one for one in window.live[-1] if one.phase == "queued"]
    oldest_s = max((one.age_s for one in waiting), default=0.0)
    if oldest_s > targets.ttft_s:
        limit = binding(window, targets)
        yield _late(
            window,
            "TTFT is queueing, not prefill",
            f"no first token in {window.span_s:.0f} s; {len(waiting)} wait, the oldest "
            f"{oldest_s:.0f} s",
            f"waiting for: {limit.said}",
            limit.change,
        )


def _prompts(window: Window, seen: Histogram) -> str:
    prompt = window.grew(*names.PROMPT)
    return "" if prompt is None else f"prompts of {prompt / seen.count:.0f} tokens on average"


def per_token(window: Window, targets: Targets) -> Iterable[Finding]:
    """Every token of an answer costs one step, so the steps say why tokens are slow."""
    seen, step = window.histogram(*names.PER_TOKEN), window.histogram(*names.STEP)
    if seen is None or step is None or seen.share_above(targets.tpot_s) < targets.late_share:
        return
    late, median_s = seen.share_above(targets.tpot_s), step.quantile(0.5)
    said = (
        f"{late:.0%} of answers slower than {targets.tpot_s * 1000:.0f} ms a token "
        f"(mean {_ms(seen.mean)}); steps: median {_ms(median_s)}, mean {_ms(step.mean)}"
    )
    batch, reads = _batch(window), _read_for_each_written(window)
    is_uneven = median_s <= targets.tpot_s and step.mean >= UNEVEN * median_s
    if reads > READS_MORE or (is_uneven and reads > 1):
        yield _long_prompts(window, said)
    elif is_uneven:
        yield Finding(
            name="a few steps are very slow",
            level=Level.PROBLEM,
            said=said,
            means="not for prompts: something else takes the machine",
            change="`kvota doctor` on that machine: throttling, swap, threads",
            source=_sources(window),
        )
    elif batch is not None and batch <= ALONE:
        yield Finding(
            name="too slow for the TPOT target, even alone",
            level=Level.PROBLEM,
            said=f"{said}; {batch:.1f} sequences a step",
            means="no setting for many requests can help one",
            change="smaller weights (`--weights int4`), a smaller model, more cores; a target that "
            "this machine can meet: `kvota plan`",
            source=_sources(window),
        )
    elif batch is not None:
        yield _too_large(window, targets, said, batch, step)


def _long_prompts(window: Window, said: str) -> Finding:
    prefilled = window.grew(*names.PREFILLED) or 0.0
    generated = window.grew(*names.GENERATED) or 0.0
    chunk = "max_num_batched_tokens down"
    own = f"{chunk}, long_prefill_share down; long_request_threshold down, so that they queue apart"
    return Finding(
        name="long prompts stall short ones",
        level=Level.PROBLEM,
        said=said,
        means=f"{prefilled:,.0f} prompt tokens read for {generated:,.0f} written: steps that read "
        "long prompts hold up everybody's next token",
        change=own if window.is_kvota else f"{chunk}, enable_chunked_prefill",
        source=f"{_sources(window)}, {window.named(*names.PREFILLED)}",
    )


def _read_for_each_written(window: Window) -> float:
    prefilled = window.grew(*names.PREFILLED) or 0.0
    return prefilled / max(window.grew(*names.GENERATED) or 0.0, 1.0)


def _too_large(
    window: Window, targets: Targets, said: str, batch: float, step: Histogram
) -> Finding:
    """The advised size takes the step as proportional to the batch: a first, cautious try."""
    advised = max(1, int(batch * targets.tpot_s / step.mean))
    setting = "max_running_requests" if window.is_kvota else "max_num_seqs"
    return Finding(
        name="batch too large for the TPOT target",
        level=Level.PROBLEM,
        said=f"{said}; {batch:.1f} sequences a step",
        means="every sequence in a step makes it longer for all of them",
        change=f"{setting} about {advised} (or `kvota bench sweep`, which measures it); more "
        "nodes, if that makes them wait",
        source=_sources(window),
    )


def _batch(window: Window) -> float | None:
    """Sequences in a step; where steps are not counted, requests that run."""
    steps = window.histogram(names.BATCH)
    if steps is not None:
        return steps.mean
    running = window.gauge(*names.RUNNING)
    return sum(running) / len(running) if running else None


def _sources(window: Window) -> str:
    named = (window.named(*names.PER_TOKEN), window.named(*names.STEP), window.named(names.BATCH))
    return ", ".join(dict.fromkeys(name for name in named if name))


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"

"""KV memory that does not come back, is taken and given again, or is not used twice."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from kvota.sizing.memory import size
from kvota.tools.doctor import names
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window

LOOKS_MIN: Final = 3  # in a row, before a figure that may be passing is believed
THRASH_MIN: Final = 5  # preemptions
THRASH_SHARE: Final = 0.1  # of the requests
GROWTH_SHARE: Final = 0.05  # of resident memory, within one window
GROWTH_BYTES: Final = 200 * 2**20
PROMPTS_MIN: Final = 4096  # tokens, before anything is said of the prefix cache
HELD: Final = "kvota_kv_blocks_held_after_abort"


def leak(window: Window, targets: Targets) -> Iterable[Finding]:
    held = window.gauge(HELD)
    if _stays(held):
        yield _leak(f"{held[-1]:.0f} blocks belong to requests that have ended", HELD)
        return
    idle = _usage_while_idle(window)
    if _stays(idle):
        yield _leak(
            f"{idle[-1]:.1%} of the KV memory is in use and no request is open",
            window.named(*names.KV_USAGE),
        )


def _leak(said: str, source: str) -> Finding:
    return Finding(
        name="KV only rises: leak",
        level=Level.PROBLEM,
        said=said,
        means="blocks are not given back; in the end nothing fits any more",
        change="restart the node, and report it with the log: no setting causes this",
        source=source,
    )


def _usage_while_idle(window: Window) -> list[float]:
    usage = window.gauge(*names.KV_USAGE)
    running, waiting = window.gauge(*names.RUNNING), window.gauge(*names.WAITING)
    if not len(usage) == len(running) == len(waiting):
        return []
    return [used for used, one, two in zip(usage, running, waiting, strict=True) if one + two == 0]


def growing_process(window: Window, targets: Targets) -> Iterable[Finding]:
    """One window cannot tell a leak from a process that is warming up."""
    resident = window.gauge(*names.MEMORY)
    if len(resident) < LOOKS_MIN or window.has_restarted:
        return
    growth = resident[-1] - resident[0]
    if growth > max(GROWTH_BYTES, GROWTH_SHARE * resident[0]) and _only_rises(resident):
        yield Finding(
            name="the process grows",
            level=Level.NOTE,
            said=f"by {size(int(growth))} to {size(int(resident[-1]))} in {window.span_s:.0f} s",
            means="KV memory is taken once, at the start; a server that has warmed up stays level",
            change="`kvota bench soak --minutes 30` tells a leak from warming up",
            source=names.MEMORY[0],
        )


def thrash(window: Window, targets: Targets) -> Iterable[Finding]:
    preempted = window.grew(*names.PREEMPTIONS) or 0.0
    paused = window.grew("kvota_repeated_pauses_total") or 0.0
    ended = window.grew(*names.ENDED) or 0.0
    number = preempted + paused
    if number < THRASH_MIN or number < THRASH_SHARE * ended:
        return
    wasted = _recomputed(window)
    yield Finding(
        name="preemption thrash",
        level=Level.PROBLEM,
        said=f"{number:.0f} times a request lost its KV, for {ended:.0f} requests that ended"
        + (f"; {wasted:,.0f} tokens were computed twice" if wasted else ""),
        means="more is admitted than fits at its peak; work is thrown away and done again",
        change=_less(window),
        source=f"{window.named(*names.PREEMPTIONS)}, {window.named(*names.PREFILLED)}",
    )


def _less(window: Window) -> str:
    if window.is_kvota:
        return (
            '`risk = 3`, or `admission = "reserve"`, which never preempts; '
            "max_running_requests down; more KV (kv_memory, `--kv-cache-dtype u8`)"
        )
    return "max_num_seqs down; gpu_memory_utilization up; kv_cache_dtype fp8"


def _recomputed(window: Window) -> float:
    """Prompt tokens computed beyond those that were asked and not found. At least that many."""
    prefilled = window.grew("kvota_prefill_tokens_total")
    prompt, hits = window.grew(names.PROMPT[0]), window.grew(names.HITS[0])
    if prefilled is None or prompt is None or hits is None:
        return 0.0
    return max(prefilled - (prompt - hits), 0.0) if prompt else 0.0


def prefix_cache(window: Window, targets: Targets) -> Iterable[Finding]:
    """A note: whether prompts have anything in common only their authors know."""
    prompt, hits = window.grew(*names.LOOKED_UP), window.grew(*names.HITS)
    asked = window.grew(*names.PROMPT) or 0.0
    if asked < PROMPTS_MIN:
        return
    if _is_off(window, prompt, hits):
        yield Finding(
            name="prefix cache off",
            level=Level.NOTE,
            said=f"{asked:,.0f} prompt tokens read, nothing kept of any",
            means="what many prompts have in common is computed again for each",
            change="prefix_cache = true" if window.is_kvota else "--enable-prefix-caching",
            source=f"{window.named(*names.HITS)}, {window.named(*names.LOOKED_UP)}",
        )
    elif prompt and hits is not None and hits < 0.01 * prompt:
        yield Finding(
            name="prefix cache useless",
            level=Level.NOTE,
            said=f"{hits:,.0f} of {prompt:,.0f} prompt tokens were found in it",
            means=_why_useless(window),
            change="put what is the same first in the prompt: instructions before dates, names "
            "and ids; with several nodes, let the gateway keep a conversation on one",
            source=window.named(*names.HITS),
        )


def _is_off(window: Window, looked_up: float | None, hits: float | None) -> bool:
    if "cached" in window.last.page.by("kvota_kv_blocks", "state"):
        return not hits and max(window.gauge_by("kvota_kv_blocks", "state", "cached")) == 0
    return window.has("vllm:prompt_tokens_total") and not looked_up


def _why_useless(window: Window) -> str:
    if max(window.gauge(*names.KV_USAGE), default=0.0) > 0.9:
        return "the memory is so full that prefixes are gone before they are asked for again"
    return "prompts differ from their first words on, or come from different tenants' salts"


def _stays(values: Sequence[float]) -> bool:
    """Above 0 and not falling at each of the last looks, half of them all or more."""
    if len(values) < LOOKS_MIN:
        return False
    last = values[-max(LOOKS_MIN, len(values) // 2) :]
    return min(last) > 0 and _only_rises(last)


def _only_rises(values: Sequence[float]) -> bool:
    return all(later >= earlier for earlier, later in pairwise(values))

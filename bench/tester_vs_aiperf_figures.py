"""The figures of one run of load, whoever tells them, and how far two tellers are apart. Pure.

All tellers mean the same by a name, which is what `bench.tester_vs_aiperf` holds them to:

    TTFT       from the request's first byte to the first piece of text; an empty one is none
    ITL        (last piece of text − first) / (output tokens − 1), of each answer
    tokens/s   output tokens of all answers / (last piece of text − first request)

aiperf's ITL is kvota's TPOT; what kvota calls gaps is aiperf's inter chunk latency. The median is
of samples here (the smaller middle one) and between samples there: alike but for few samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from kvota.tools.load.asked import Seen
from kvota.tools.load.measure import tokens_within
from kvota.tools.load.percentiles import percentile
from kvota.tools.top.samples import Samples

TOLERANCE: Final = 0.05
MS_PER_S: Final = 1000.0

Told = Sequence[tuple[float, Sequence[float]]]
"""Of each request, in seconds of one clock: when it came, and when each of its tokens left."""


class NotComparable(Exception):
    """A run did not do what was asked of it; the message says what."""


Figures = Mapping[str, float]
"""Of one run, by the names of TITLES. A server's own page tells no medians."""

TITLES: Final[Mapping[str, str]] = {
    "ttft_mean": "TTFT mean, ms",
    "ttft_p50": "TTFT p50, ms",
    "itl_mean": "ITL mean, ms",
    "itl_p50": "ITL p50, ms",
    "tokens_per_s": "output tokens/s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One operating point: a closed loop of `concurrency`, all requests alike."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.concurrency} at once, "
            f"{self.prompt_tokens} + {self.output_tokens} tokens"
        )


def of_seen(seen: Sequence[Seen], wanted: Wanted) -> Figures:
    """What kvota's tester says. Raises NotComparable where an answer is not as was wanted."""
    for one in seen:
        if not one.is_whole or one.first_token_s is None or one.per_token_s is None:
            raise NotComparable(f"kvota's tester: {one.code or 'too short'}: {one.message}")
        _check("kvota's tester", one.output_tokens, one.prompt_tokens, wanted)
    _check_number("kvota's tester", len(seen), wanted)
    begin_s = min(one.scheduled_s + one.sent_s for one in seen)
    last_s = max(one.scheduled_s + one.token_s[-1] for one in seen)
    end_s = max(one.scheduled_s + one.ended_s for one in seen)  # after every token
    return _figures(
        [one.first_token_s - one.sent_s for one in seen if one.first_token_s is not None],
        [one.per_token_s for one in seen if one.per_token_s is not None],
        tokens_within(seen, begin_s, end_s) / (last_s - begin_s),
    )


def of_told(told: Told) -> Figures:
    """What a server knows that has written down when it did what."""
    num_tokens = sum(len(left_s) for _, left_s in told)
    begin_s = min(came_s for came_s, _ in told)
    last_s = max(left_s[-1] for _, left_s in told)
    return _figures(
        [left_s[0] - came_s for came_s, left_s in told],
        [(left_s[-1] - left_s[0]) / (len(left_s) - 1) for _, left_s in told],
        num_tokens / (last_s - begin_s),
    )


def of_node(before: Samples, after: Samples, wanted: Wanted) -> Figures:
    """What a node's metrics page says of the requests between two looks. Means; no medians.

    Its clock begins when a request has arrived and stops when a token is sampled. The rate is that
    of requests without a pause between them.
    """
    ttft_s = _mean_between(before, after, "kvota_time_to_first_token_seconds")
    itl_s = _mean_between(before, after, "kvota_time_per_output_token_seconds")
    whole_s = ttft_s + (wanted.output_tokens - 1) * itl_s
    return {
        "ttft_mean": MS_PER_S * ttft_s,
        "itl_mean": MS_PER_S * itl_s,
        "tokens_per_s": wanted.concurrency * wanted.output_tokens / whole_s,
    }


def relative(figures: Figures, truth: Figures) -> Figures:
    """Each figure as a multiple of what the server says of the same run."""
    return {name: figures[name] / truth[name] for name in truth}


def of_aiperf(text: str, wanted: Wanted) -> Figures:
    """What aiperf has written to profile_export_aiperf.json (schema 1.4)."""
    page = json.loads(text)
    try:
        if page.get("error_request_count"):
            raise NotComparable(f"aiperf: {page['error_request_count']['avg']:g} requests failed")
        _check_number("aiperf", page["request_count"]["avg"], wanted)
        output, prompt = page["output_sequence_length"], page["input_sequence_length"]
        for end in ("min", "max"):
            _check("aiperf", output[end], prompt[end], wanted)
        return {
            "ttft_mean": _ms(page["time_to_first_token"], "avg"),
            "ttft_p50": _ms(page["time_to_first_token"], "p50"),
            "itl_mean": _ms(page["inter_token_latency"], "avg"),
            "itl_p50": _ms(page["inter_token_latency"], "p50"),
            "tokens_per_s": float(page["output_token_throughput"]["avg"]),
        }
    except (KeyError, TypeError) as error:
        raise NotComparable(f"aiperf's export has no {error}") from error


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure the median over rounds, which a busy moment of the machine does not move."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def differences(ours: Figures, other: Figures) -> dict[str, float]:
    """ours / other − 1, of what both tell."""
    return {name: ours[name] / other[name] - 1 for name in TITLES if name in ours and name in other}


def is_near(apart: Mapping[str, float]) -> bool:
    return all(abs(value) <= TOLERANCE for value in apart.values())


def table(columns: Mapping[str, Figures]) -> str:
    """Markdown: the columns, then how far the first is from each of the others."""
    (first, ours), *others = columns.items()
    apart = {f"{first} / {name}": differences(ours, other) for name, other in others}
    head = ["", *columns, *apart]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for name, shown in TITLES.items():
        if not all(name in one for one in columns.values()):
            continue
        cells = [f"{one[name]:.1f}" for one in columns.values()]
        cells += [f"{one[name]:+.1%}" for one in apart.values()]
        lines.append(f"| {' | '.join([shown, *cells])} |")
    return "\n".join([*lines, ""])


def _figures(ttft_s: Sequence[float], itl_s: Sequence[float], tokens_per_s: float) -> Figures:
    return {
        "ttft_mean": MS_PER_S * fmean(ttft_s),
        "ttft_p50": MS_PER_S * percentile(sorted(ttft_s), 0.5),
        "itl_mean": MS_PER_S * fmean(itl_s),
        "itl_p50": MS_PER_S * percentile(sorted(itl_s), 0.5),
        "tokens_per_s": tokens_per_s,
    }


def _mean_between(before: Samples, after: Samples, name: str) -> float:
    (sum_before, num_before), (sum_after, num_after) = (
        (page.total(f"{name}_sum"), page.total(f"{name}_count")) for page in (before, after)
    )
    if sum_after is None or num_after is None or num_after == (num_before or 0):
        raise NotComparable(f"the node's page has nothing new of {name}")
    return (sum_after - (sum_before or 0)) / (num_after - (num_before or 0))


def _ms(metric: Mapping[str, Any], name: str) -> float:
    if metric["unit"] != "ms":
        raise NotComparable(f"aiperf tells latency in {metric['unit']}, not in ms")
    return float(metric[name])


def _check_number(who: str, num: float, wanted: Wanted) -> None:
    if num != wanted.num_requests:
        raise NotComparable(f"{who}: {num:g} of {wanted.num_requests} requests were answered")


def _check(who: str, output: float, prompt: float | None, wanted: Wanted) -> None:
    """Lengths as the server counts them."""
    if output != wanted.output_tokens:
        raise NotComparable(f"{who}: {output:g} output tokens, not {wanted.output_tokens}")
    if prompt != wanted.prompt_tokens:
        raise NotComparable(f"{who}: {prompt} prompt tokens, not {wanted.prompt_tokens}")

"""Requests that are turned away: for which reason, by which limit, and who keeps asking."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvota.tools.doctor import names
from kvota.tools.doctor.binding import binding
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window

STORM_REFUSALS: Final = 20  # fewer in a window are an accident
STORM_SHARE: Final = 0.8  # of a key's requests refused: it does not wait as it is told
STORM_PART: Final = 0.5  # of all refusals, that one key must have


@dataclass(frozen=True, slots=True)
class _Reason:
    means: str
    change: str  # empty: whatever moves the binding limit


_KEY_LIMIT: Final = "`kvota keys limits`, if the key should have more"
_REASONS: Final[Mapping[str, _Reason]] = {
    "queue_full": _Reason("the line is at max_waiting_queue", ""),
    "queue_timeout": _Reason("they waited queue_timeout_s in line and got no place", ""),
    "deadline_unreachable": _Reason(
        "by the desk's forecast their first token would have come too late", ""
    ),
    "kv_budget_exhausted": _Reason(
        "prompt and max_tokens together are more than all KV memory",
        "clients with a smaller max_tokens; more KV: kv_memory, `--kv-cache-dtype u8`",
    ),
    "draining": _Reason("the server is being stopped", "nothing, if that is meant"),
    "engine_restarting": _Reason("no engine to ask", "see why it restarts"),
    "rate_limit_requests": _Reason("their own limit of requests a minute", _KEY_LIMIT),
    "rate_limit_tokens": _Reason("their own limit of tokens a minute", _KEY_LIMIT),
    "rate_limit_concurrency": _Reason("their own limit of requests at once", _KEY_LIMIT),
    "abuse_blocked": _Reason(
        "they are shut out for asking what always fails",
        "mend the client; abuse_failures_max, abuse_block_s",
    ),
    "missing_api_key": _Reason("they send no key", "a key for that client: `kvota keys create`"),
    "invalid_api_key": _Reason("they send a wrong key", "a new key: `kvota keys create`"),
    "expired_api_key": _Reason("their key is too old", "`kvota keys rotate`"),
    "model_not_allowed": _Reason("their key may not use that model", "`kvota keys create --model`"),
}
_UNKNOWN: Final = _Reason("", "the error's message says more than its code; see the log")


def refusing(window: Window, targets: Targets) -> Iterable[Finding]:
    """One finding for each reason, the most frequent first."""
    name, label = _counter(window)
    refused = window.grew_by(name, label)
    asked = max(window.grew(*names.ENDED) or 0.0, sum(refused.values()))
    for code, number in sorted(refused.items(), key=lambda item: -item[1]):
        yield _refusing(window, targets, code, number, asked, name)


def _refusing(
    window: Window, targets: Targets, code: str, number: float, asked: float, source: str
) -> Finding:
    reason, share = _REASONS.get(code, _UNKNOWN), number / asked
    said = (
        f"{number:.0f} of {asked:.0f} requests ({share:.0%}), {number / window.span_s:.3g} a second"
    )
    means, change = _with_limit(window, code, reason.means), reason.change
    if not change:
        limit = binding(window, targets)
        means = f"{means}; waiting for: {limit.said}"
        change = _own_setting(code, limit.change)
        source = f"{source}, {limit.source}"
    return Finding(
        name=f"refusing: {code}",
        level=Level.PROBLEM if share >= targets.refused_share else Level.NOTE,
        said=said,
        means=means,
        change=change,
        source=source,
    )


_LIMITS: Final[Mapping[str, str]] = {
    "queue_full": "max_waiting_queue",
    "queue_timeout": "queue_timeout_s",
    "deadline_unreachable": "first_token_timeout_s",
}


def _with_limit(window: Window, code: str, means: str) -> str:
    """What it means, with the setting's value where the server shows it."""
    setting = _LIMITS.get(code, "")
    value = window.limit(setting)
    return means if value is None else f"{means} ({setting} = {value:g})"


def _own_setting(code: str, moves_the_limit: str) -> str:
    helps_bursts = {
        "queue_full": "max_waiting_queue helps only against bursts",
        "queue_timeout": "queue_timeout_s only makes them wait longer",
        "deadline_unreachable": "first_token_timeout_s, if it is tighter than need be",
    }
    return f"{moves_the_limit}. {helps_bursts[code]}"


def _counter(window: Window) -> tuple[str, str]:
    """A gateway counts what its node refused as well."""
    if window.has_gateway:
        return "kvota_gateway_rejected_total", "code"
    return "kvota_rejected_total", "reason"


def retry_storm(window: Window, targets: Targets) -> Iterable[Finding]:
    """Somebody asks again and again at once. Without usage pages: that it is so, not who."""
    refused = sum(window.grew_by(*_counter(window)).values())
    if refused < STORM_REFUSALS:
        return
    keys = _by_key(window)
    if keys is None:
        yield from _nameless(window, refused)
        return
    for key_id, (tenant, requests, refusals) in keys.items():
        is_most = refusals >= STORM_PART * sum(one[2] for one in keys.values())
        if refusals >= STORM_REFUSALS and is_most and refusals >= STORM_SHARE * requests:
            yield Finding(
                name=f"retry storm from key {key_id}",
                level=Level.PROBLEM,
                said=f"{requests} requests, {refusals} refused, "
                f"{requests / window.span_s:.3g} a second (tenant {tenant})",
                means="it asks again without waiting as Retry-After tells it",
                change=f"`kvota.client` in that program; until then `kvota keys limits {key_id} "
                "--requests-per-minute N`",
                source="/admin/usage",
            )


def _nameless(window: Window, refused: float) -> Iterable[Finding]:
    answered = (window.grew(*names.ENDED) or 0.0) - refused
    if refused < STORM_SHARE * (refused + max(answered, 0.0)):
        return
    yield Finding(
        name="retry storm, or far too much load",
        level=Level.NOTE,
        said=f"{refused:.0f} refusals for {max(answered, 0.0):.0f} answers, "
        f"{refused / window.span_s:.3g} a second",
        means="whose they are is known only to a gateway, and told only to an operator's key",
        change="clients that wait as Retry-After tells them (`kvota.client`); "
        "`kvota doctor --url GATEWAY --api-key …` to see which key it is",
        source=_counter(window)[0],
    )


def _by_key(window: Window) -> dict[str, tuple[str, int, int]] | None:
    """Key → tenant, requests and refusals of the window; None where usage is not shown."""
    if window.first.usage is None or window.last.usage is None:
        return None
    before = {one.key_id: one for one in window.first.usage}
    grown = {}
    for one in window.last.usage:
        old = before.get(one.key_id)
        requests = one.requests - (old.requests if old else 0)
        refusals = one.refusals - (old.refusals if old else 0)
        if requests > 0:
            grown[one.key_id] = (one.tenant, requests, refusals)
    return grown

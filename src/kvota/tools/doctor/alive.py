"""Whether anything moves at all: the server, its engine, its node, its backends."""

from collections.abc import Iterable, Mapping
from typing import Final

from kvota.tools.doctor import names
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window


def away(window: Window, targets: Targets) -> Iterable[Finding]:
    if window.is_away:
        yield Finding(
            name="server does not answer",
            level=Level.PROBLEM,
            said=window.readings[-1].error or "no answer",
            means="it answered when this look began",
            change="see whether the process lives, and its log",
            source="/metrics",
        )


def stuck(window: Window, targets: Targets) -> Iterable[Finding]:
    """Work is open all the time and not one token comes of it."""
    is_still = _has_stood_still(window) and window.span_s >= targets.stuck_after_s
    not_ready = window.last.not_ready
    if is_still:
        phases = ", ".join(f"{number} in {phase}" for phase, number in window.phases().items())
        said = f"no token in {window.span_s:.0f} s with work open"
        yield Finding(
            name="engine stuck",
            level=Level.PROBLEM,
            said=f"{said} ({phases})" if phases else said,
            means=f"/ready: {not_ready}" if not_ready else "/ready still says ready",
            change="restart the node (`kvota serve` does that by itself); its log has a line "
            "`engine stuck` that says where. If single steps take so long: "
            "max_num_batched_tokens down, stuck_after_s up",
            source=f"{window.named(*names.GENERATED)}, {window.named(*names.RUNNING)}",
        )
    elif not_ready:
        yield Finding(
            name="not ready",
            level=Level.PROBLEM,
            said=not_ready,
            means="load balancers send nothing here",
            change="wait for the end of a start or a drain; if it stays, the log says why",
            source="/ready",
        )


def _has_stood_still(window: Window) -> bool:
    open_work = [
        running + waiting
        for running, waiting in zip(
            window.gauge(*names.RUNNING), window.gauge(*names.WAITING), strict=False
        )
    ]
    if not open_work or min(open_work) < 1:
        return False
    progress = (window.grew(*names.GENERATED), window.grew(*names.PREFILLED))
    return any(one is not None for one in progress) and not any(progress)


def failing_steps(window: Window, targets: Targets) -> Iterable[Finding]:
    failed = window.grew("kvota_step_failures_total")
    if failed:
        yield Finding(
            name="steps fail",
            level=Level.PROBLEM,
            said=f"the model runtime failed {failed:.0f} times",
            means="the requests of such a step end with an error",
            change="the node's log has the runtime's words; often memory: a smaller "
            "max_num_batched_tokens or kv_budget_ratio",
            source="kvota_step_failures_total",
        )


_WHY_ENDED: Final[Mapping[str, str]] = {
    "exited": "its log has its last words; without any, the kernel ended it for want of memory: "
    "`kvota doctor` on that machine, kv_budget_ratio",
    "stuck": "steps too long for stuck_after_s: max_num_batched_tokens down",
    "silent": "it did not answer for node_silent_s: too few cores for it (`kvota doctor` there)",
    "too_fat": "it grew beyond node_growth_max: a leak, or kv_budget_ratio too near to 1",
    "too_slow": "the model takes too long to load: the disk, or the model cache",
}


def node_restarts(window: Window, targets: Targets) -> Iterable[Finding]:
    ends = window.grew_by("kvota_gateway_node_ends_total", "why")
    starts = window.gauge("kvota_gateway_node_starts")
    num_starts = starts[-1] - starts[0] if starts else 0
    up = window.gauge("kvota_gateway_node_up")
    is_down = bool(up) and not up[-1]
    if not (ends or num_starts or is_down or window.has_restarted):
        return
    whys = ", ".join(f"{why} ({number:.0f})" for why, number in ends.items())
    state = "it is down now" if is_down else "it is up again"
    advice = [_WHY_ENDED[why] for why in ends if why in _WHY_ENDED]
    yield Finding(
        name="node restarting",
        level=Level.PROBLEM,
        said=f"it ended: {whys or 'nobody saw why'}; {state}",
        means="running requests are lost, and nothing is answered until the model is loaded",
        change="; ".join(advice) or "its log has the reason",
        source="kvota_gateway_node_ends_total, kvota_gateway_node_up, process_start_time_seconds",
    )


def backends(window: Window, targets: Targets) -> Iterable[Finding]:
    shut = _breakers(window)
    for name, state in shut.items():
        yield Finding(
            name=f"breaker {state}: {name}",
            level=Level.PROBLEM,
            said=_attempts(window, name),
            means="the gateway leaves this backend alone for a while, then tries it again",
            change=f"examine {name} itself: `kvota doctor --url` there; /admin/backends has its "
            "last error. It closes by itself when probes succeed",
            source="kvota_gateway_breaker_state, kvota_gateway_attempts_total",
        )
    healthy = window.last.page.by("kvota_gateway_backend_healthy", "backend")
    for name, value in healthy.items():
        if not value and name not in shut:
            yield Finding(
                name=f"backend down: {name}",
                level=Level.PROBLEM,
                said="its latest probe failed",
                means="no request is sent there",
                change="start it, or mend its url in [[backends]]; /admin/backends says why",
                source="kvota_gateway_backend_healthy",
            )


def _breakers(window: Window) -> dict[str, str]:
    """Backend → state, where it is not closed at the last look."""
    found = {}
    for state in ("open", "half_open"):
        name = "kvota_gateway_breaker_state"
        for backend in window.last.page.by(name, "backend"):
            if window.last.page.where(backend=backend, state=state).total(name):
                found[backend] = state.replace("_", "-")
    return found


def _attempts(window: Window, backend: str) -> str:
    endings = window.grew_by("kvota_gateway_attempts_total", "ending", backend=backend)
    if not endings:
        return "no attempt in this time"
    return "attempts: " + ", ".join(
        f"{number:.0f} {ending}" for ending, number in sorted(endings.items())
    )

"""What clients do to the service and to themselves."""

from collections.abc import Iterable
from typing import Final

from kvota.tools.doctor import names
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.stations import stations
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Window

SLOW_SHARE: Final = 0.05  # of requests
CLIENT_SHARE: Final = 0.3  # of a request's time
CLIENT_S: Final = 0.5  # a shorter wait is the network
LEFT_SHARE: Final = 0.2
LEFT_MIN: Final = 5
WRONG_SHARE: Final = 0.2
WRONG_MIN: Final = 5


def slow_readers(window: Window, targets: Targets) -> Iterable[Finding]:
    cut, ended = _outcomes(window).get("slow_reader", 0.0), window.grew(*names.ENDED) or 0.0
    whole = window.histogram(*names.WHOLE)
    client_s = next(one.mean_s for one in stations(window) if one.name == "client") or 0.0
    is_long = whole is not None and client_s > max(CLIENT_S, CLIENT_SHARE * whole.mean)
    if not cut and not is_long:
        return
    waits = f"{client_s:.2g} s from the last token to the last byte taken" if is_long else ""
    cuts = f"{cut:.0f} of {ended:.0f} answers cut: nothing was read for send_timeout_s"
    yield Finding(
        name="slow readers",
        level=Level.PROBLEM if is_long or cut >= SLOW_SHARE * ended else Level.NOTE,
        said="; ".join(part for part in (cuts if cut else "", waits) if part),
        means="while a client does not read, its request holds KV that others wait for",
        change="mend the client or the proxy before it; a shorter send_timeout_s frees the KV "
        "sooner",
        source="kvota_requests_total{outcome=slow_reader}, kvota_request_seconds",
    )


def giving_up(window: Window, targets: Targets) -> Iterable[Finding]:
    left, ended = _outcomes(window).get("client_closed", 0.0), window.grew(*names.ENDED) or 0.0
    if left < LEFT_MIN or left < LEFT_SHARE * ended:
        return
    yield Finding(
        name="clients give up",
        level=Level.NOTE,
        said=f"{left:.0f} of {ended:.0f} requests were left by their client",
        means="their timeouts are shorter than the answers; what was computed is for nobody",
        change="longer timeouts in the clients, or a smaller max_tokens; queue_timeout_s below "
        "their patience, so that they are told at once",
        source="outcome client_closed",
    )


def asking_wrongly(window: Window, targets: Targets) -> Iterable[Finding]:
    wrong, ended = _outcomes(window).get("invalid", 0.0), window.grew(*names.ENDED) or 0.0
    if wrong < WRONG_MIN or wrong < WRONG_SHARE * ended:
        return
    yield Finding(
        name="clients ask for what cannot be",
        level=Level.NOTE,
        said=f"{wrong:.0f} of {ended:.0f} requests got a 400",
        means="mostly prompt and max_tokens beyond the context, or beyond all KV memory",
        change="the log has each error's code and message; max_model_len, if the model can more",
        source="outcome invalid",
    )


def _outcomes(window: Window) -> dict[str, float]:
    gateway = window.grew_by("kvota_gateway_requests_total", "outcome")
    node = window.grew_by("kvota_requests_total", "outcome")
    return {name: max(gateway.get(name, 0), node.get(name, 0)) for name in {*gateway, *node}}

"""Where an answered request's time goes, over six stations. Means, in seconds a request.

    door ─▶ line ─▶ prefill ─▶ decode ─▶ stream ─▶ client
     │       │        │          │         │         └ gateway's end − node's, after the first token
     │       │        │          │         └ node's last byte handed over − last token
     │       │        │          └ last token − first token
     │       │        └ first token − first chunk
     │       └ arrival at the engine's desk to the first chunk
     └ first token at the gateway − first token at the node: keys, filters, routing, attempts;
       in front of foreign engines: arrival to the last attempt

Without a gateway on the page the door is not measured, and waiting for the client to read shows
where the stream is written: both are one figure there, under `client`. Where a server does not
say how long requests queue, line and prefill are one figure, under `prefill`; where it does not
measure the pace of tokens, everything after the first one is under `decode`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kvota.tools.doctor import names
from kvota.tools.doctor.window import Window

_GATEWAY = "kvota_gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """`mean_s` None: not measured there. `num_now`: requests in it at the last look."""

    name: str
    mean_s: float | None
    num_now: int | None
    how: str


def stations(window: Window) -> tuple[Station, ...]:
    """All six, in the order in which a request passes them; the client is last and first."""
    door_s, client_s, stream_s = _ends(window)
    waiting = window.gauge(*names.WAITING)
    num_waiting = int(waiting[-1]) if waiting else None
    has_queue, has_pace = bool(window.named(*names.QUEUE)), _has_pace(window)
    return (
        Station(name="client", mean_s=client_s, num_now=None, how="last token to last byte taken"),
        Station(name="door", mean_s=door_s, num_now=None, how="keys, filters, routing"),
        Station(
            name="line", mean_s=_line(window), num_now=num_waiting, how="waiting"
        ),
        Station(
            name="prefill", mean_s=_prefill(window), num_now=_count(window, "prefill"),
            how="reading the prompt" if has_queue else "waiting in line and reading the prompt",
        ),
        Station(
            name="decode", mean_s=decode_s(window), num_now=_count(window, "decode"),
            how="writing tokens" if has_pace else "writing and sending tokens",
        ),
        Station(name="stream", mean_s=stream_s, num_now=None, how="node to gateway"),
    )  # fmt: skip


def as_json(passed: Iterable[Station]) -> list[dict[str, object]]:
    return [asdict(one) for one in passed]


def decode_s(window: Window) -> float | None:
    """Mean time from the first to the last token. Never more than what is left of a request."""
    measured = _mean(window, *names.DECODE)
    if measured is not None:
        return measured
    per_token, whole = _mean(window, *names.PER_TOKEN), window.histogram(*names.WHOLE)
    first_s, output = _mean(window, *names.FIRST_TOKEN), window.grew(*names.OUTPUT)
    if whole is None or first_s is None:
        return None
    if per_token is None or output is None:
        return max(whole.mean - first_s, 0.0)
    tokens = max(output / whole.count - 1, 0.0)
    return min(per_token * tokens, max(whole.mean - first_s, 0.0))


def _prefill(window: Window) -> float | None:
    measured = _mean(window, "vllm:request_prefill_time_seconds")
    if measured is not None:
        return measured
    first_s = _mean(window, *names.FIRST_TOKEN)
    before_s = (_line(window) or 0.0) + (_own_door(window) or 0.0)
    return None if first_s is None else max(first_s - before_s, 0.0)


def _line(window: Window) -> float | None:
    """A gateway's own desk counts from arrival, so its door is taken off."""
    queue_s = _mean(window, *names.QUEUE)
    return None if queue_s is None else max(queue_s - (_own_door(window) or 0.0), 0.0)


def _own_door(window: Window) -> float | None:
    """As the gateway times it. None where its node's page follows: that tells more."""
    has_node = window.has("kvota_request_seconds_sum")
    return None if has_node else _mean(window, f"{_GATEWAY}_door_seconds")


def _ends(window: Window) -> tuple[float | None, float | None, float | None]:
    """Door, client and stream."""
    first_s, whole_s = _mean(window, *names.FIRST_TOKEN), _mean(window, *names.WHOLE)
    decoding_s = decode_s(window)
    if first_s is None or whole_s is None or decoding_s is None or not _has_pace(window):
        return _own_door(window), None, None
    after_s = _mean(window, "kvota_stream_seconds")
    if after_s is None:
        after_s = max(whole_s - first_s - decoding_s, 0.0)
    front_first_s = _mean(window, f"{_GATEWAY}_time_to_first_token_seconds")
    front_whole_s = _mean(window, f"{_GATEWAY}_request_seconds")
    if (
        front_first_s is None
        or front_whole_s is None
        or not window.has("kvota_request_seconds_sum")
    ):
        return None, after_s, None
    later_s = (front_whole_s - front_first_s) - (whole_s - first_s)
    return max(front_first_s - first_s, 0.0), max(later_s, 0.0), after_s


def _has_pace(window: Window) -> bool:
    return bool(window.named(*names.PER_TOKEN, *names.DECODE))


def _mean(window: Window, *histograms: str) -> float | None:
    found = window.histogram(*histograms)
    return None if found is None else found.mean


def _count(window: Window, phase: str) -> int | None:
    return window.phases().get(phase, 0) if window.live else None

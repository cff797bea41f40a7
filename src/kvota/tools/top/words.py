"""Numbers as people read them in a narrow terminal."""

from collections.abc import Sequence
from typing import Literal

from kvota.tools.top.scene import Scene
from kvota.wire.requests import LATEST, LiveRequest

Side = Literal["left", "right"]

# Of the table of requests, with the side to which each keeps.
_COLUMNS: tuple[tuple[str, Side], ...] = (
    ("id", "left"),
    ("lane", "left"),
    ("band", "left"),
    ("phase", "left"),
    ("prefill", "right"),
    ("tokens", "right"),
    ("tok/s", "right"),
    ("blocks", "right"),
    ("age", "right"),
    ("waits for", "left"),
)
COLUMNS = tuple(f" {name}" for name, _ in _COLUMNS)
SIDES: tuple[Side, ...] = tuple(side for _, side in _COLUMNS)
NAME_LENGTH_MAX = 11
_TICKS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "–"


def duration(seconds: float | None) -> str:
    """Two units at most: 4 s, 3 m 12 s, 5 h 02 m, 2 d 03 h."""
    if seconds is None:
        return _UNKNOWN
    whole = round(seconds)
    for size, unit, below, below_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below:02d} {below_unit}"
    return f"{whole} s"


def short_duration(seconds: float | None) -> str:
    """The same for a column: 4s, 3m12, 5h02."""
    text = duration(seconds)
    parts = text.split()
    return text.replace(" ", "") if len(parts) < 4 else "".join(parts[:3])


def speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return _UNKNOWN
    return f"{tokens_per_s:.1f}" if tokens_per_s < 10 else f"{tokens_per_s:,.0f}"


def short_name(request: LiveRequest, length: int = NAME_LENGTH_MAX) -> str:
    """What the client calls it, cut to a column."""
    name = request.client_id
    return name if len(name) <= length else name[: length - 1] + "…"


def row(request: LiveRequest) -> tuple[str, ...]:
    """A request as the cells of COLUMNS."""
    read = min(request.computed_tokens, request.prompt_tokens)
    cells = (
        short_name(request),
        request.lane,
        {"interactive": "inter"}.get(request.band, request.band),
        request.phase,
        f"{read}/{request.prompt_tokens}",
        f"{request.output_tokens}/{request.max_tokens * request.num_choices}",
        speed(request.tokens_per_s),
        str(request.kv_blocks),
        short_duration(request.age_s),
        request.why or "",
    )
    return tuple(f" {cell}" for cell in cells)


def line(scene: Scene, width: int, height: int) -> list[str]:
    """The waiting line in `height` rows: position, when it is served, who, what it waits for."""
    shown = [_place(request)[:width] for request in scene.line[:height]]
    if len(scene.line) > height > 0:
        shown[-1] = f"… and {len(scene.line) - height + 1} more"
    return shown


def _place(request: LiveRequest) -> str:
    when = "?" if request.eta_s is None else short_duration(request.eta_s)
    when = f"≤{when}" if request.eta_basis in LATEST else when
    name = short_name(request, 8)
    return f"{request.position or '?':<3}{when:>5} {name:<8} {request.why or ''}".rstrip()


def title(scene: Scene) -> str:
    state = "ready" if scene.not_ready is None else "not ready"
    up = "" if scene.uptime_s is None else f" · up {duration(scene.uptime_s)}"
    return f"{scene.model} · {state}{up}"


def rates(scene: Scene) -> str:
    return (
        f"running {scene.num_running}  waiting {scene.num_waiting}  "
        f"preempted {scene.num_preemptions}  {refusals(scene)}"
    )


def refusals(scene: Scene) -> str:
    if not scene.refusals:
        return "refused 0"
    reasons = ", ".join(f"{reason} {count}" for reason, count in scene.refusals.items())
    return f"refused {sum(scene.refusals.values())}: {reasons}"


def memory(scene: Scene) -> str:
    """How full the pool is, in one line; behind a gateway, the share in use of each backend."""
    if scene.kv_shares:
        return " · ".join(f"{name} {share:.0%}" for name, share in scene.kv_shares.items())
    blocks = scene.blocks
    share = blocks.used / blocks.total if blocks.total else 0.0
    return f"used {blocks.used} ({share:.0%}) · cached {blocks.cached} · free {blocks.free}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest `width` values as columns between 0 and the highest; right-aligned."""
    shown = values[-width:] if width > 0 else ()
    highest = max(shown, default=0.0) or 1.0
    steps = len(_TICKS) - 1
    return "".join(_TICKS[round(steps * value / highest)] for value in shown).rjust(max(width, 0))

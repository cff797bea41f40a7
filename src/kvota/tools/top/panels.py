"""The drawn parts of the screen. Each draws the latest scene into whatever room it has."""

from rich.style import Style
from rich.text import Text
from textual.reactive import reactive
from textual.widget import Widget

from kvota.tools.top import words
from kvota.tools.top.carpark import LETTERS, Bay, Spot, blocks_per_bay, park
from kvota.tools.top.scene import Scene

# Readable with dark letters on dark and light terminals; neighbours in the alphabet differ most.
_PAINT = (
    "#7ba3cf", "#f5a04c", "#7cc274", "#c79cbf", "#ec7f80", "#86c7c2", "#f0d469", "#bd9a86",
    "#ffb1b9", "#a3cfca", "#dcb9d3", "#a5dc97", "#cdb554",
)  # fmt: skip
_OTHER_PAINT = "#a0a0a0"
_SIGNS = {Spot.CACHED: "░", Spot.FREE: "·"}
_LEGEND = "A–z request  + mixed  # other  ░ cached  · free"


class Panel(Widget):
    """Draws itself anew for every scene and every size."""

    scene: reactive[Scene | None] = reactive[Scene | None](None)


class SpeedLine(Panel):
    """Tokens per second: now, and a column for each reading before."""

    def render(self) -> Text:
        scene = self.scene
        label = f"tok/s {words.speed(scene.speed if scene else None):>6} "
        speeds = scene.speeds if scene else ()
        columns = words.sparkline(speeds, self.content_size.width - len(label))
        return Text(label) + Text(columns, style="green")


class CarPark(Panel):
    """The KV pool."""

    def render(self) -> Text:
        size = self.content_size
        per_row, num_rows = size.width // 2, size.height - 1
        if self.scene is None or per_row < 1 or num_rows < 1:
            return Text()
        if self.scene.kv_shares:
            return Text("Which blocks are whose, these engines do not tell.", style="dim")
        bays = park(self.scene.blocks, self.scene.holdings, per_row * num_rows)
        rows = [bays[at : at + per_row] for at in range(0, len(bays), per_row)]
        drawn = [Text().join(map(_drawn, row)) for row in rows]
        return Text("\n").join([*drawn, Text(_LEGEND, style="dim")])

    def watch_scene(self, scene: Scene | None) -> None:
        if scene is None:
            return
        num_bays = max(1, self.content_size.width // 2 * (self.content_size.height - 1))
        width = blocks_per_bay(scene.blocks.total, num_bays)
        self.border_title = f"KV {words.memory(scene)}"
        one = f"a bay is {width} block{'s' if width > 1 else ''}"
        self.border_subtitle = "" if scene.kv_shares else one


class Line(Panel):
    """Who waits, the next one first."""

    def render(self) -> Text:
        if self.scene is None:
            return Text()
        lines = words.line(self.scene, self.content_size.width, self.content_size.height)
        return Text("\n".join(lines)) if lines else Text("nobody waits", style="dim")

    def watch_scene(self, scene: Scene | None) -> None:
        if scene is not None:
            self.border_title = f"In line {len(scene.line)}"


def car_style(letter: str) -> Style:
    """The paint of a request's blocks, and of its letter in the table."""
    if not letter.strip():
        return Style()
    at = LETTERS.find(letter)
    paint = _OTHER_PAINT if at < 0 else _PAINT[at % len(_PAINT)]
    return Style(color="#101010", bgcolor=paint, bold=True)


def _drawn(bay: Bay) -> Text:
    """One bay: its sign, and the line that parts it from the next."""
    if bay.spot is Spot.USED:
        letter = bay.letter or ""
        return Text(letter, style=car_style(letter)) + Text("▏", style="dim")
    return Text(f"{_SIGNS[bay.spot]}▏", style="dim")

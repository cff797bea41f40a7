"""The screen of `kvota top`. Everything it shows comes ready-made from `scene` and `words`.

title · rates · speed          three lines, and a banner when something is wrong or paused
KV memory │ line               the car park, and who waits for it
requests                       one row each; the cursor stays on its request
"""

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from kvota.core.clock import Clock
from kvota.tools.server import ServerUnusable
from kvota.tools.top import words
from kvota.tools.top.panels import CarPark, Line, Panel, SpeedLine, car_style
from kvota.tools.top.scene import Scene, Watch
from kvota.tools.top.server import Server
from kvota.wire.requests import LiveRequest


class TopApp(App[None]):
    """Reads `server` every `interval_s` seconds until it is closed."""

    CSS = """
    #title { height: 1; text-style: bold; }
    #rates { height: auto; max-height: 2; }
    #speed { height: 1; }
    #banner { display: none; height: auto; max-height: 3; background: $warning 30%; }
    #banner.shown { display: block; }
    #middle { height: 9; }
    #park { width: 5fr; border: round $primary; }
    #line { width: 3fr; border: round $primary; }
    #requests { height: 1fr; scrollbar-size: 0 1; }
    .stale { opacity: 55%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("d", "delete", "Cancel request"),
        Binding("p", "pause", "Pause"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "kvota top"

    def __init__(
        self, server: Server, clock: Clock, unix_time: Callable[[], float], *, interval_s: float
    ) -> None:
        super().__init__()
        self._server = server
        self._clock = clock
        self._unix_time = unix_time
        self._interval_s = interval_s
        self._watch = Watch()
        self._scene: Scene | None = None
        self._seen_s = 0.0
        self._lost: str | None = None  # why the server did not answer last time
        self._is_paused = False

    def compose(self) -> ComposeResult:
        yield Static(f"kvota top · {self._server.url}", id="title", markup=False)
        yield Static("", id="rates", markup=False)
        yield SpeedLine(id="speed")
        yield Static("", id="banner", markup=False)
        with Horizontal(id="middle"):
            yield CarPark(id="park")
            yield Line(id="line")
        yield DataTable(id="requests", cursor_type="row", cell_padding=0)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        table = self._table
        table.add_column("", key="letter")
        for name, side in zip(words.COLUMNS, words.SIDES, strict=True):
            table.add_column(Text(name, justify=side), key=name)
        self.run_worker(self._follow())

    async def on_unmount(self) -> None:
        await self._server.close()

    # --- what happens -------------------------------------------------------------------------

    async def _follow(self) -> None:
        while self.is_running:
            if not self._is_paused:
                await self._look()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        try:
            reading = await self._server.read()
        except ServerUnusable as error:
            self._lost = error.message
            self._watch.lose()
        else:
            self._lost = None
            self._seen_s = self._clock.now()
            self._scene = self._watch.see(reading, self._seen_s, self._unix_time())
        if self.is_running:  # while it waited the screen may have been taken down
            self._draw()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw_banner()

    def action_delete(self) -> None:
        """Ask about the request under the cursor, and cancel it on a yes."""
        request = self._chosen()
        if request is None:
            return

        def decide(is_sure: bool | None) -> None:
            if is_sure:
                self.run_worker(self._cancel(request))

        self.push_screen(Question(f"Cancel request {request.client_id}?"), decide)

    async def _cancel(self, request: LiveRequest) -> None:
        try:
            await self._server.cancel(request.id)
        except ServerUnusable as error:
            self.notify(error.message, severity="warning", markup=False)
        else:
            self.notify(f"Cancelled {request.client_id}.", markup=False)

    # --- what is shown ------------------------------------------------------------------------

    def _draw_banner(self) -> None:
        text = self._banner()
        banner = self.query_one("#banner", Static)
        banner.update(text)
        banner.set_class(bool(text), "shown")
        for part in ("#middle", "#requests"):
            self.query_one(part).set_class(self._lost is not None, "stale")

    def _banner(self) -> str:
        """What the operator must know before reading on; nothing when all is well."""
        if self._is_paused:
            return "Paused; p goes on."
        if self._lost is not None:
            trying = f"{self._lost} Trying again every {self._interval_s:g} s."
            age = words.duration(self._clock.now() - self._seen_s)
            return trying if self._scene is None else f"{trying} This is from {age} ago."
        if self._scene is not None and self._scene.not_ready is not None:
            return f"Not ready: {self._scene.not_ready}"
        return ""

    def _draw(self) -> None:
        self._draw_banner()
        scene = self._scene
        if scene is None or self._lost is not None:
            return
        self.query_one("#title", Static).update(f"{words.title(scene)} · {self._server.url}")
        self.query_one("#rates", Static).update(words.rates(scene))
        for panel in self.query(Panel):
            panel.scene = scene
        self._draw_table(scene)

    def _draw_table(self, scene: Scene) -> None:
        """All rows anew. The cursor stays on its request, but at the top it stays at the top."""
        table = self._table
        chosen = self._chosen_id() if table.cursor_row else None
        scrolled = table.scroll_offset
        table.clear()
        for request in scene.requests:
            letter = scene.letters.get(request.id, " ")
            cells = words.row(request)
            table.add_row(
                Text(letter, style=car_style(letter)),
                *(Text(cell, justify=side) for cell, side in zip(cells, words.SIDES, strict=True)),
                key=request.id,
            )
        if chosen is not None and chosen in table.rows:
            table.move_cursor(row=table.get_row_index(chosen), scroll=False)
        table.scroll_to(scrolled.x, scrolled.y, animate=False)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#requests", DataTable)

    def _chosen_id(self) -> str | None:
        table = self._table
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    def _chosen(self) -> LiveRequest | None:
        chosen = self._chosen_id()
        requests = self._scene.requests if self._scene else ()
        return next((request for request in requests if request.id == chosen), None)


class Question(ModalScreen[bool]):
    """Yes or no; anything but a clear yes is a no."""

    CSS = """
    Question { align: center middle; }
    Question Static { width: auto; max-width: 70; padding: 1 3; border: round $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny: yes   n: no", markup=False)

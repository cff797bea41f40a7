"""What both servers read and continue: shipped text in several languages and code, or files.

A shipped file begins with `Source:` and `Licence:` lines and a blank one, which are not read to
the servers.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvota.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    source: str
    licence: str
    body: str


def shipped_texts() -> list[Text]:
    """The texts of `text/index.toml`, in its order."""
    return [_shipped(entry["name"], entry["file"]) for entry in _toml("index.toml")["text"]]


def shipped_prompts() -> list[str]:
    """Beginnings to continue, of `text/prompts.toml`."""
    return [str(prompt) for prompt in _toml("prompts.toml")["prompts"]]


def text_of(path: Path) -> Text:
    """An operator's own text. Raises ConfigError."""
    try:
        body = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}.") from None
    if not body.strip():
        raise ConfigError(f"{path} is empty.")
    return Text(path.name, str(path), "", body)


def _shipped(name: str, file: str) -> Text:
    head, _, body = _read(file).partition("\n\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    return Text(name, fields["Source"], fields["Licence"], body.rstrip("\n"))


def _toml(file: str) -> dict[str, Any]:
    return tomllib.loads(_read(file))


def _read(file: str) -> str:
    return (resources.files("kvota.tools.evaluate") / "text" / file).read_text(encoding="utf-8")

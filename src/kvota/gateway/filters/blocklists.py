"""Block lists: rules as data, in TOML.

    about = "Keys and passwords that should not leave the house."

    [[rule]]
    name = "aws-access-key"          # what the log and the client are told
    patterns = ['\\bAKIA[A-Z0-9]{16}\\b']     # see patterns.py for what may stand here
    case_sensitive = true            # default: no difference between A, a and Ａ

    [[rule]]
    name = "project-names"
    literals = ["Project Falcon"]    # as they stand
    whole_words = true               # default: also inside other words

Some come with kvota and go by their name; others are files of one's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.filters.automaton import Automaton, Scan
from kvota.gateway.filters.patterns import Part, can_be_empty, literal, parse

_SHIPPED: Final = resources.files("kvota.gateway.filters") / "lists"


class Rule(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: str
    patterns: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    case_sensitive: bool = False
    whole_words: bool = False


class BlockList(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    about: str = ""
    rule: tuple[Rule, ...] = ()


class BlockListFilter:
    """Finds what any of the lists names."""

    def __init__(self, lists: Iterable[BlockList]) -> None:
        """Raises ConfigError for patterns that cannot be used."""
        self._automaton = Automaton(
            (rule.name, part) for known in lists for rule in known.rule for part in _parts(rule)
        )

    def scan(self) -> Scan:
        return self._automaton.scan()


def read_block_list(name: str) -> BlockList:
    """A list that comes with kvota, by its name, or a file. Raises ConfigError."""
    shipped = shipped_block_lists()
    place: Traversable = shipped[name] if name in shipped else Path(name).expanduser()
    try:
        found = msgspec.toml.decode(place.read_bytes(), type=BlockList)
    except OSError as error:
        raise ConfigError(
            f"The block list {name!r} cannot be read ({error.strerror}). It is a file, or one of "
            f"{', '.join(sorted(shipped))}."
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"The block list {name!r} is not right: {error}.") from error
    for rule in found.rule:
        _require_sense(rule, name)
    return found


def shipped_block_lists() -> dict[str, Traversable]:
    """The lists that come with kvota, by name."""
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".toml")
    }


def _parts(rule: Rule) -> Iterator[Part]:
    ignores_case = not rule.case_sensitive
    for text in rule.literals:
        yield literal(text, ignores_case=ignores_case, whole_words=rule.whole_words)
    for pattern in rule.patterns:
        part = parse(pattern, ignores_case=ignores_case)
        if can_be_empty(part):
            raise ConfigError(
                f"The pattern {pattern!r} of the rule {rule.name!r} matches nothing at all, and "
                "so would be found in every text."
            )
        yield part


def _require_sense(rule: Rule, where: str) -> None:
    everything: Sequence[str] = (*rule.literals, *rule.patterns)
    if not everything or "" in everything:
        raise ConfigError(
            f"The rule {rule.name!r} of the block list {where!r} needs literals or patterns, "
            "and none of them may be empty."
        )

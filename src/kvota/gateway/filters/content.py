"""The seam for content filters: what goes in is searched whole, what comes out as it streams.

    check_request(body) ─▶ ContentFiltered before anything runs
    guard = filters.guard() ─▶ guard.push(text) gives what may be sent now ─▶ guard.finish()

A filter sees one text at a time, piece by piece, and says after each piece whether a rule is
found and how many of the last characters may be the beginning of a find. Those, and only those,
are held back, so no part of a find is ever sent.

Other packages add filters through the entry point group `kvota.filters`: a callable without
arguments that returns a ContentFilter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from kvota.core.errors import ConfigError, ContentFiltered, InvalidRequest
from kvota.gateway.filters.blocklists import BlockListFilter, read_block_list

ENTRY_POINTS: Final = "kvota.filters"
VALUES_MAX: Final = 50_000  # of one request, in lists and dicts; each is looked at
_NOT_SEARCHED: Final = frozenset({"model"})  # a name, looked up and never shown to a model


class Scan(Protocol):
    """One text being searched."""

    @property
    def num_open(self) -> int:
        """How many of the last characters may still turn out to belong to a find."""

    def feed(self, text: str) -> str | None:
        """The name of a rule that is found once this piece is read, or None."""

    def finish(self) -> str | None:
        """The name of a rule that is found because nothing follows, or None."""


@runtime_checkable
class ContentFilter(Protocol):
    """Makes scans. Called on the event loop, so it must not block or take long."""

    def scan(self) -> Scan: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    block_lists: tuple[str, ...] = ()  # names of those that come with kvota, or files
    plugins: tuple[str, ...] = ()  # names in the entry point group kvota.filters
    on_input: bool = True
    on_output: bool = True


class FilterFound(ContentFiltered):
    """A rule was found. `rule` is for the log; neither holds any of the text."""

    def __init__(self, rule: str, where: str, *, param: str | None = None) -> None:
        super().__init__(
            f"The {where} holds something that this server does not let through "
            f"(rule {rule!r} of its content filter).",
            param=param,
        )
        self.rule = rule


class OutputGuard:
    """The output of one choice on its way to the client."""

    def __init__(self, scans: Sequence[Scan]) -> None:
        self._scans = scans
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters that are not sent yet."""
        return len(self._held)

    def push(self, text: str) -> str:
        """What may be sent now. Raises FilterFound; then nothing more may be sent."""
        if not self._scans:
            return text
        pending = self._held + text
        num_open = 0
        for scan in self._scans:
            _require_none(scan.feed(text))
            num_open = max(num_open, scan.num_open)
        border = max(0, len(pending) - num_open)
        self._held = pending[border:]
        return pending[:border]

    def finish(self) -> str:
        """What was held back, now that the choice is complete. Raises FilterFound."""
        for scan in self._scans:
            _require_none(scan.finish())
        held, self._held = self._held, ""
        return held


class Filters:
    """All filters of a gateway."""

    def __init__(
        self,
        filters: Sequence[ContentFilter],
        *,
        on_input: bool = True,
        on_output: bool = True,
    ) -> None:
        self._input = filters if on_input else ()
        self._output = filters if on_output else ()

    @property
    def has_output(self) -> bool:
        """Answers are searched, so they have to be read."""
        return bool(self._output)

    def check_request(self, request: msgspec.Struct) -> None:
        """Search everything a decoded body says. Raises FilterFound, naming the field.

        Also InvalidRequest for a prompt of token ids, which no filter can read, and for more values
        than a filter looks through.
        """
        if not self._input:
            return
        texts = _Texts()
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if value is None or name in _NOT_SEARCHED:
                continue
            _refuse_token_ids(name, value)
            for text in texts.inside(value, name):
                self._check(text, name)

    def guard(self) -> OutputGuard:
        """A fresh guard for one choice."""
        return OutputGuard([known.scan() for known in self._output])

    def _check(self, text: str, param: str) -> None:
        for known in self._input:
            scan = known.scan()
            rule = scan.feed(text) or scan.finish()
            if rule is not None:
                raise FilterFound(rule, "request", param=param)


def load_filters(settings: FilterSettings) -> Filters:
    """Raises ConfigError for lists and plug-ins that are not there or cannot be used."""
    filters: list[ContentFilter] = []
    if settings.block_lists:
        filters.append(BlockListFilter(read_block_list(name) for name in settings.block_lists))
    known = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    filters += [_plugged_in(name, known) for name in settings.plugins]
    return Filters(filters, on_input=settings.on_input, on_output=settings.on_output)


class _Texts:
    """The texts of one request, found in bounded time."""

    def __init__(self) -> None:
        self._num_values = 0

    def inside(self, value: Any, param: str) -> Iterator[str]:
        """Every text inside lists, dicts (their keys too) and structs that is not empty.

        The text parts of one message are one text, as the model reads them. Raises InvalidRequest.
        """
        todo = [value]
        while todo:
            match todo.pop():
                case str() as text:
                    if text:
                        yield text
                case list() as values:
                    self._count(len(values), param)
                    parts = [_part_text(one) for one in values]
                    others = [one for one, part in zip(values, parts, strict=True) if part is None]
                    todo += reversed(others)
                    todo.append("".join(part for part in parts if part))
                case dict() as fields:
                    self._count(len(fields), param)
                    todo += reversed([one for field in fields.items() for one in field])
                case msgspec.Struct() as struct:
                    todo += reversed([getattr(struct, one) for one in struct.__struct_fields__])

    def _count(self, num_values: int, param: str) -> None:
        self._num_values += num_values
        if self._num_values > VALUES_MAX:
            raise InvalidRequest(
                f"With `{param}` the request holds more than {VALUES_MAX} values, the most that "
                "this server's content filter looks through. Send fewer.",
                param=param,
            )


def _part_text(value: Any) -> str | None:
    """The text of a content part; None for everything else."""
    if isinstance(value, msgspec.Struct) and "text" in value.__struct_fields__:
        text: str | None = getattr(value, "text", None)
        return text
    return None


def _refuse_token_ids(name: str, value: Any) -> None:
    if name in ("prompt", "input") and isinstance(value, list) and _holds_numbers(value):
        raise InvalidRequest(
            f"`{name}` holds token ids, which this server's content filter cannot read. "
            "Send text instead.",
            param=name,
        )


def _holds_numbers(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, int) or (isinstance(value, list) and _holds_numbers(value))
        for value in values
    )


def _require_none(rule: str | None) -> None:
    if rule is not None:
        raise FilterFound(rule, "answer")


def _plugged_in(name: str, known: dict[str, EntryPoint]) -> ContentFilter:
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"No installed package offers the content filter {name!r} (entry point group "
            f"{ENTRY_POINTS}). Those there are: {there}."
        )
    try:
        make: Callable[[], Any] = known[name].load()
        made = make()
    except Exception as error:  # a boundary: the code is somebody else's
        raise ConfigError(f"The content filter {name!r} cannot be made: {error!r}.") from error
    if not isinstance(made, ContentFilter):
        raise ConfigError(f"The content filter {name!r} has no method `scan`.")
    return made

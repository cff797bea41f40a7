"""From the bytes of a body to a request struct; what is wrong is said with the field's name.

msgspec refuses NaN and Infinity literals, lone surrogates, bad UTF-8 and wrong types by itself,
and says where: "Expected `int`, got `str` - at `$.max_tokens`". This file turns that into
OpenAI's `message` and `param`, and bounds how deep a body may nest and of how many parts it is:
first by what costs nothing to see, since all of this holds up the event loop.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvota.core.errors import InvalidRequest
from kvota.wire.openai import FORM_FIELDS

T = TypeVar("T", bound=msgspec.Struct)

DEPTH_MAX = 128  # of arrays and objects inside each other
NODES_MAX = 200_000  # arrays and objects in one field: whoever looks at each holds others up
ENTRIES_MAX: Final[Mapping[str, int]] = {"messages": 4096, "tools": 128}
_SCAN_BYTES_MAX = 1 << 20  # bodies above are not searched for the name of the field at fault
_WHERE = re.compile(r"`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*)` - at `\$\.(?P<path>[^`]*)`", re.DOTALL
)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_HALF_PAIR = re.compile(  # the first half without the second, or the second without the first
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)
_HALF_PAIR_WORDS = (
    "a string holds half of a surrogate pair (\\ud800 to \\udfff), as when an emoji is cut in two"
)
_NODES = (list, dict, msgspec.Struct)
_LEAVES = frozenset({str, int, float, bool, type(None)})
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")  # of UTF-8 and UTF-16
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes bodies of one kind; built once and shared by all requests."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._names = kind.__struct_fields__

    def decode(self, body: bytes) -> T:
        """The request in `body`. Raises InvalidRequest that names the field where it can."""
        try:
            request = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _field_error(str(error)) from None
        except RecursionError:
            raise _too_deep(_field_that_nests(body)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"The body is not valid JSON: {_reason(body, error)}.") from None
        if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
            return request  # too few to nest that deep, and most bodies are like that
        for name, most in ENTRIES_MAX.items():
            _check_number(getattr(request, name, None), name, most)
        for name in self._names:
            _check_parts(getattr(request, name), name)
        return request


def is_nested_deeper(value: Any, depth_max: int) -> bool:
    """True when lists and dicts sit inside each other more than `depth_max` deep."""
    return any(depth >= depth_max for depth, _ in enumerate(_levels(value)))


def _check_number(value: Any, name: str, most: int) -> None:
    if isinstance(value, list) and len(value) > most:
        message = f"`{name}` has {len(value)} entries; the limit is {most}."
        raise InvalidRequest(message, param=name)


def _check_parts(value: Any, name: str) -> None:
    num_nodes = 0
    for depth, level in enumerate(_levels(value)):
        if depth == DEPTH_MAX:
            raise _too_deep(name)
        num_nodes += len(level)
        if num_nodes > NODES_MAX:
            message = f"`{name}` holds more than {NODES_MAX} lists and objects."
            raise InvalidRequest(message, param=name)


def _levels(value: Any) -> Iterator[list[Any]]:
    """The lists and dicts of each depth, from the outermost on."""
    level = [value] if isinstance(value, _NODES) else []
    while level:
        yield level
        level = [child for node in level for child in _nodes_in(node)]


def _nodes_in(node: Any) -> Iterable[Any]:
    """Of millions of token ids only the types are looked at, which is several times as fast."""
    if isinstance(node, list):
        children: Iterable[Any] = node
    elif isinstance(node, dict):
        children = node.values()
    else:
        children = msgspec.structs.astuple(node)
    if _LEAVES.issuperset(map(type, children)):
        return ()
    return [one for one in children if type(one) not in _LEAVES and isinstance(one, _NODES)]


def _reason(body: bytes, error: Exception) -> str:
    if body.startswith(_MARKS):
        return "it must be UTF-8, without a byte order mark before it"
    return _HALF_PAIR_WORDS if _HALF_PAIR.search(body) else str(error)


def _field_error(text: str) -> InvalidRequest:
    """OpenAI's form of msgspec's words. `$.messages[0].role` becomes `messages[0].role`."""
    unknown = _UNKNOWN.fullmatch(text)
    if unknown:
        return _unknown_field(unknown["path"], unknown["name"])
    where = _WHERE.search(text)
    path = where["path"] if where else ""
    what = text.partition(" - at ")[0]
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"`{path}` is missing.", param=path)
    if not path:
        return InvalidRequest(f"The body must be a JSON object: {what}.")
    return InvalidRequest(f"`{path}` is not valid: {what}.", param=path)


def _unknown_field(path: str, name: str) -> InvalidRequest:
    """A key where a misspelling would change what is asked for. There is one such object."""
    param = f"{path}.{name[:64]}"
    return InvalidRequest(
        f"`{param}` is unknown. The keys of `{path}` are {', '.join(FORM_FIELDS)}.", param=param
    )


def _too_deep(param: str | None) -> InvalidRequest:
    where = f"`{param}`" if param else "The body"
    return InvalidRequest(
        f"{where} nests arrays and objects deeper than the limit of {DEPTH_MAX}.", param=param
    )


def _field_that_nests(body: bytes) -> str | None:
    """The top-level field under which nesting first passes the limit."""
    if len(body) > _SCAN_BYTES_MAX:
        return None
    depth, name = 0, b""
    for match in _STRUCTURE.finditer(body):
        mark = match[0]
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
        elif depth == 1:
            name = mark[1:-1]
        if depth > DEPTH_MAX:
            break
    return name.decode("utf-8", "replace")[:64] or None

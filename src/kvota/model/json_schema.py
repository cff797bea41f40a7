"""A client's JSON schema made safe to compile: bounded, and rewritten where that changes nothing.

llguidance enforces most of JSON Schema and refuses by name the keywords that it does not. Four
things are left to do before it may see a schema:

- bounds: its size, its depth, and the automata of `multipleOf`, whose states are as many as the
  divisor and which no limit of llguidance covers;
- the few spellings that it would silently not enforce (draft 4's boolean bounds, its own options);
- `oneOf`, which it accepts only between different types: where branches provably exclude each
  other, by type or by a tag as in pydantic's discriminated unions, `anyOf` means the same;
- formats of others ("path", "uuid4", "password"), which say nothing of what is valid, are left out.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any

from kvota.core.errors import InvalidRequest

SCHEMA_BYTES_MAX = 128 * 1024
SCHEMA_DEPTH_MAX = 100  # nested objects and arrays of the schema's text; serde_json stops at 128
MULTIPLE_OF_STATES_MAX = 50_000  # about half a second to build
REF_HOPS_MAX = 10
PAIRED_BRANCHES_MAX = 100  # of a oneOf that one pass does not show to be exclusive
# Their values are data, not schemas: nothing inside is a keyword.
LITERAL_KEYWORDS = frozenset({"const", "enum", "default", "examples"})

# Of JSON Schema 2020-12, section 7.3. Every other format is an annotation: "custom" values must
# not be relied on. Those of these that llguidance does not know it refuses by name.
FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email"),
        *("hostname", "idn-hostname", "ipv4", "ipv6", "uuid", "regex"),
        *("uri", "uri-reference", "uri-template", "iri", "iri-reference"),
        *("json-pointer", "relative-json-pointer"),
    }
)


def safe_schema(schema: object, *, param: str) -> str:
    """The text of a schema that may be compiled; raises InvalidRequest that names what is wrong."""
    if schema is True:
        return "{}"
    if schema is False:
        raise InvalidRequest("The JSON schema `false` allows no text at all.", param=param)
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"A JSON schema must be an object, got {type(schema).__name__}.", param=param
        )
    _check_extent(schema, param)
    _check_keywords(schema, param)
    try:
        rewritten = _rewritten(schema, _Document(schema))
        text = json.dumps(rewritten, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except ValueError as error:  # NaN, infinity, half of a surrogate pair
        raise InvalidRequest(f"The schema is not valid JSON: {error}.", param=param) from error
    if size > SCHEMA_BYTES_MAX:
        raise _too_long(str(size), param)
    return text


def _check_extent(schema: object, param: str) -> None:
    """Before anything that takes longer. Level by level, so that no depth exhausts the stack."""
    level, num_values = [schema], 1
    for _ in range(SCHEMA_DEPTH_MAX):
        level = [child for node in level for child in _children(node)]
        num_values += len(level)
        if num_values > SCHEMA_BYTES_MAX:  # each is a byte at least
            raise _too_long(f"over {SCHEMA_BYTES_MAX}", param)
        if not level:
            return
    raise InvalidRequest(
        f"The schema is nested deeper than {SCHEMA_DEPTH_MAX} levels.", param=param
    )


def _too_long(size: str, param: str) -> InvalidRequest:
    message = f"The schema is {size} bytes long; at most {SCHEMA_BYTES_MAX} are compiled."
    return InvalidRequest(message, param=param)


def _check_keywords(schema: Mapping[str, Any], param: str) -> None:
    if "x-guidance" in schema:
        raise InvalidRequest("`x-guidance` is not a JSON schema keyword.", param=param)
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if any(isinstance(value, bool) for value in _values_of(schema, name)):
            raise InvalidRequest(
                f"`{name}` must be a number; the boolean form of draft 4 is not enforced.",
                param=param,
            )
    divisors = [
        # The decimal that the client wrote: 0.1 is 1/10, not the nearest binary fraction.
        Fraction(value if isinstance(value, int) else repr(value))
        for value in _values_of(schema, "multipleOf")
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    ]
    if _num_states(divisors) > MULTIPLE_OF_STATES_MAX:
        raise InvalidRequest(
            "`multipleOf` is too costly to enforce: number of uses × least common multiple "
            f"(in units of the smallest decimal) must be at most {MULTIPLE_OF_STATES_MAX}.",
            param=param,
        )


def _num_states(divisors: Sequence[Fraction]) -> int:
    """An upper bound of the automata's states: under allOf, divisors meet in their multiple.

    Or one of them that is too many already: the multiple of thousands has as many digits.
    """
    unit = math.lcm(*(divisor.denominator for divisor in divisors))  # divides a power of ten
    multiple = 1
    for divisor in divisors:
        multiple = math.lcm(multiple, int(divisor * unit))
        if multiple > MULTIPLE_OF_STATES_MAX:
            return multiple
    return len(divisors) * multiple


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    """What tells a branch from others. Says nothing where that is unclear."""

    types: frozenset[str] = frozenset()
    tags: Mapping[str, frozenset[str]] = field(default_factory=dict)


class _Document:
    """A schema whose parts refer to each other. Each reference and branch is looked at once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets: dict[str, object] = {}
        self._branches: dict[int, _Branch] = {}  # by the identity of a part of `root`

    def branch(self, node: object) -> _Branch:
        resolved = self._resolve(node)
        if resolved is None:
            return _Branch()
        if id(resolved) not in self._branches:
            self._branches[id(resolved)] = _Branch(_types(resolved), _tags(resolved))
        return self._branches[id(resolved)]

    def _resolve(self, node: object) -> Mapping[str, Any] | None:
        """The schema behind local references; None if unclear."""
        for _ in range(REF_HOPS_MAX):
            if not isinstance(node, dict):
                return None
            target = node.get("$ref")
            if target is None:
                return node
            if not isinstance(target, str):
                return None
            if target not in self._targets:
                self._targets[target] = _at_pointer(self._root, target)
            node = self._targets[target]
        return None


def _rewritten(node: object, document: _Document) -> object:
    """A copy with `anyOf` for `oneOf` of provably exclusive branches, and without others' formats.

    What is called `oneOf` or `format` may be a property: then its value is a schema of its own.
    """
    if isinstance(node, list):
        return [_rewritten(child, document) for child in node]
    if not isinstance(node, dict):
        return node
    branches = node.get("oneOf")
    rename = (
        "anyOf" not in node
        and isinstance(branches, list)
        and _are_exclusive([document.branch(branch) for branch in branches])
    )
    return {
        "anyOf" if rename and key == "oneOf" else key: (
            value if key in LITERAL_KEYWORDS else _rewritten(value, document)
        )
        for key, value in node.items()
        if not (key == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _are_exclusive(branches: Sequence[_Branch]) -> bool:
    """Whether no text can match two branches. False also means: cannot tell."""
    if _are_disjoint([branch.types for branch in branches]):
        return True
    if all(branch.types == {"object"} for branch in branches):
        names = set.intersection(*(set(branch.tags) for branch in branches))
        if any(_are_disjoint([branch.tags[name] for branch in branches]) for name in names):
            return True
    return len(branches) <= PAIRED_BRANCHES_MAX and all(
        _exclude(one, other) for one, other in combinations(branches, 2)
    )


def _are_disjoint(sets: Sequence[frozenset[str]]) -> bool:
    """Whether all say something, and no two the same. One pass, however many there are."""
    return all(sets) and len(frozenset().union(*sets)) == sum(map(len, sets))


def _exclude(one: _Branch, other: _Branch) -> bool:
    if one.types and other.types and one.types.isdisjoint(other.types):
        return True
    if one.types != {"object"} or other.types != {"object"}:
        return False
    names = one.tags.keys() & other.tags.keys()
    return any(one.tags[name].isdisjoint(other.tags[name]) for name in names)


def _types(branch: Mapping[str, Any]) -> frozenset[str]:
    """The types that a branch allows, integers counted as numbers; empty when it does not say."""
    stated = branch.get("type", [])
    names = [stated] if isinstance(stated, str) else stated
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    return frozenset("number" if name == "integer" else name for name in names)


def _tags(branch: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The required properties whose values are listed strings, with those values."""
    required, properties = branch.get("required"), branch.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    names = frozenset(name for name in required if isinstance(name, str))
    tags = {}
    for name, schema in properties.items():
        if name in names and isinstance(schema, dict):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                tags[name] = frozenset(values)
    return tags


def _at_pointer(root: Mapping[str, Any], target: str) -> object:
    if not target.startswith("#/"):
        return None
    node: object = root
    for part in target[2:].split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _values_of(node: object, keyword: str) -> Iterator[object]:
    """The values of `keyword` anywhere in the document: a $ref may make any place a schema."""
    if isinstance(node, dict) and keyword in node:
        yield node[keyword]
    for child in _children(node):
        yield from _values_of(child, keyword)


def _children(node: object) -> Iterator[object]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node

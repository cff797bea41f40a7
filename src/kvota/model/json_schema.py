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
from fractions import Fraction
from itertools import combinations
from typing import Any

from kvota.core.errors import InvalidRequest

SCHEMA_BYTES_MAX = 128 * 1024
SCHEMA_DEPTH_MAX = 100  # nested objects and arrays of the schema's text; serde_json stops at 128
MULTIPLE_OF_STATES_MAX = 50_000  # about half a second to build
REF_HOPS_MAX = 10
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
    _check_depth(schema, param)
    _check_keywords(schema, param)
    try:
        text = json.dumps(_rewritten(schema, schema), ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except ValueError as error:  # NaN, infinity, half of a surrogate pair
        raise InvalidRequest(f"The schema is not valid JSON: {error}.", param=param) from error
    if size > SCHEMA_BYTES_MAX:
        raise InvalidRequest(
            f"The schema is {size} bytes long; at most {SCHEMA_BYTES_MAX} are compiled.",
            param=param,
        )
    return text


def _check_depth(schema: object, param: str) -> None:
    """Level by level, so that no depth can exhaust the stack."""
    level: list[object] = [schema]
    for _ in range(SCHEMA_DEPTH_MAX):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise InvalidRequest(
        f"The schema is nested deeper than {SCHEMA_DEPTH_MAX} levels.", param=param
    )


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
    """An upper bound of the automata's states: under allOf, divisors meet in their multiple."""
    unit = math.lcm(*(divisor.denominator for divisor in divisors))
    return len(divisors) * math.lcm(*(int(divisor * unit) for divisor in divisors))


def _rewritten(node: object, root: Mapping[str, Any]) -> object:
    """A copy with `anyOf` for `oneOf` of provably exclusive branches, and without others' formats.

    What is called `oneOf` or `format` may be a property: then its value is a schema of its own.
    """
    if isinstance(node, list):
        return [_rewritten(child, root) for child in node]
    if not isinstance(node, dict):
        return node
    branches = node.get("oneOf")
    rename = "anyOf" not in node and isinstance(branches, list) and _are_exclusive(branches, root)
    return {
        "anyOf" if rename and key == "oneOf" else key: (
            value if key in LITERAL_KEYWORDS else _rewritten(value, root)
        )
        for key, value in node.items()
        if not (key == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _are_exclusive(branches: Sequence[object], root: Mapping[str, Any]) -> bool:
    """Whether no text can match two branches. False also means: cannot tell."""
    resolved = [_resolve(branch, root) for branch in branches]
    return all(_exclude(one, other) for one, other in combinations(resolved, 2))


def _exclude(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    types, other_types = _types(one), _types(other)
    if types and other_types and types.isdisjoint(other_types):
        return True
    if types != {"object"} or other_types != {"object"}:
        return False
    tags, other_tags = _tags(one), _tags(other)
    return any(tags[name].isdisjoint(other_tags[name]) for name in tags.keys() & other_tags.keys())


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
    tags = {}
    for name, schema in properties.items():
        if name in required and isinstance(schema, dict):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                tags[name] = frozenset(values)
    return tags


def _resolve(branch: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind local references; an empty one, which excludes nothing, if unclear."""
    for _ in range(REF_HOPS_MAX):
        if not isinstance(branch, dict):
            return {}
        target = branch.get("$ref")
        if target is None:
            return branch
        branch = _at_pointer(root, target)
    return {}


def _at_pointer(root: Mapping[str, Any], target: object) -> object:
    if not isinstance(target, str) or not target.startswith("#/"):
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

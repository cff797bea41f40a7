"""One JSON schema of several documents: valid is what is valid under any of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvota.model.json_schema import LITERAL_KEYWORDS

_OF_A_DOCUMENT = frozenset({"$id", "$schema"})  # with a base of its own, references would miss
# Their values are schemas by name: a property may well be called "$ref".
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def any_schema(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`anyOf` the schemas, each whole under `$defs`, its local references turned to its new place.

    Of embedded resources (`$id` inside a schema) and anchors nothing is known here: such references
    stay as they are, and whoever compiles the schema refuses what they do not find.
    """
    places = [f"#/$defs/{index}" for index in range(len(schemas))]
    documents = [
        {name: value for name, value in schema.items() if name not in _OF_A_DOCUMENT}
        for schema in schemas
    ]
    return {
        "anyOf": [{"$ref": place} for place in places],
        "$defs": {
            place.rpartition("/")[2]: _moved(document, place)
            for place, document in zip(places, documents, strict=True)
        },
    }


def _moved(node: object, place: str, *, by_name: bool = False) -> object:
    if isinstance(node, list):
        return [_moved(child, place) for child in node]
    if not isinstance(node, dict):
        return node
    return {name: _moved_member(name, value, place, by_name) for name, value in node.items()}


def _moved_member(name: str, value: object, place: str, by_name: bool) -> object:
    if by_name:
        return _moved(value, place)
    if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if name in LITERAL_KEYWORDS:
        return value
    return _moved(value, place, by_name=name in _BY_NAME)

"""Several schemas as one: valid is what is valid under any, and references find their own."""

import json
from typing import Any

import jsonschema
import pytest

from kvota.model.schema_choice import any_schema

TREE = {
    "$id": "https://example.com/tree",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "$ref": {"type": "null"}},
    "required": ["kids"],
    "additionalProperties": False,
}
COUNT = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 3}}}
WORD = {"definitions": {"n": {"const": "w"}}, "allOf": [{"$ref": "#/definitions/n"}]}
DATA = {"const": {"$ref": "#/$defs/n"}}
SCHEMAS: list[dict[str, Any]] = [TREE, COUNT, WORD, DATA]
VALUES: list[Any] = [
    *({"kids": []}, {"kids": [{"kids": []}]}, {"kids": [], "$ref": None}, {"kids": [3]}, {}),
    *(3, 2, "w", "v", {"$ref": "#/$defs/n"}, {"$ref": "#/$defs/1/$defs/n"}, None),
]


def is_valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("value", VALUES, ids=json.dumps)
def test_valid_under_any_is_valid_under_the_whole(value: Any) -> None:
    expected = any(is_valid(value, schema) for schema in SCHEMAS)
    assert is_valid(value, any_schema(SCHEMAS)) == expected
    assert is_valid(value, any_schema([any_schema(SCHEMAS[:2]), any_schema(SCHEMAS[2:])])) == (
        expected
    )


def test_the_schemas_given_are_left_alone() -> None:
    before = json.dumps(SCHEMAS)
    any_schema(SCHEMAS)
    assert json.dumps(SCHEMAS) == before

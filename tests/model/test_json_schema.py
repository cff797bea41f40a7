"""What is changed in a client's schema before it is compiled, and what must stay as it is."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import InvalidRequest
from kvota.model.json_schema import (
    PAIRED_BRANCHES_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMA_DEPTH_MAX,
    safe_schema,
)


def safe(schema: Any) -> Any:
    return json.loads(safe_schema(schema, param="response_format"))


def tagged(kind: str, **rest: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, "value": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["kind"], **rest}


EXCLUSIVE = [
    [{"type": "integer"}, {"type": "string"}, {"type": ["null", "boolean"]}],
    [tagged("cat"), tagged("dog"), {"type": "array"}],
    [tagged("cat"), {"$ref": "#/$defs/dog"}],
    [{"$ref": "#/$defs/alias"}, tagged("cat")],
]
UNCLEAR = [
    [{"type": "integer"}, {"type": "number"}],
    [{"type": ["string", "null"]}, {"type": "null"}],
    [tagged("cat"), tagged("cat")],
    [tagged("cat"), tagged("dog", required=[])],
    [tagged("cat"), {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]}],
    [tagged("cat"), {"$ref": "#/$defs/missing"}],
    [tagged("cat"), {"$ref": "#/$defs/loop"}],
    [tagged("cat"), {"$ref": "https://example.org/dog"}],
    [tagged("cat"), True],
    [{}, {"type": "string"}],
]
DEFINITIONS = {
    "dog": tagged("dog"),
    "alias": {"$ref": "#/$defs/dog"},
    "loop": {"$ref": "#/$defs/loop"},
}


@pytest.mark.parametrize("branches", EXCLUSIVE)
def test_branches_that_exclude_each_other_become_any_of(branches: list[Any]) -> None:
    schema = {"type": "array", "items": {"oneOf": branches}, "$defs": DEFINITIONS}
    assert safe(schema) == {**schema, "items": {"anyOf": branches}}


def test_a_thousand_tagged_branches_are_told_apart_and_as_many_unclear_ones_are_not() -> None:
    branches = [
        {"type": "object", "properties": {"kind": {"const": str(n)}}, "required": ["kind"]}
        for n in range(1000)
    ]
    assert safe({"oneOf": branches}) == {"anyOf": branches}
    for twice in (branches[3], {"type": "object"}):
        schema = {"oneOf": [*branches, twice]}
        assert safe(schema) == schema


def test_branches_of_several_kinds_are_compared_one_by_one_only_while_they_are_few() -> None:
    def schema(num_tagged: int) -> dict[str, Any]:
        return {"oneOf": [*(tagged(str(n)) for n in range(num_tagged)), {"type": "array"}]}

    assert "anyOf" in safe(schema(PAIRED_BRANCHES_MAX - 1))
    assert "oneOf" in safe(schema(PAIRED_BRANCHES_MAX))


def test_formats_that_json_schema_does_not_define_are_left_out() -> None:
    properties = {
        "format": {"type": "string", "format": "path"},
        "when": {"type": "string", "format": "date", "title": "When"},
        "kind": {"const": {"format": "path"}},
    }
    assert safe({"type": "object", "properties": properties}) == {
        "type": "object",
        "properties": {**properties, "format": {"type": "string"}},
    }


@pytest.mark.parametrize("branches", UNCLEAR)
def test_branches_that_may_overlap_stay_one_of(branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": DEFINITIONS}
    assert safe(schema) == schema


values = st.sampled_from([None, True, 3, 2.5, "cat", [], [1], {}, {"kind": "cat"}, {"kind": "dog"}])
branch_kinds = st.sampled_from(
    [{"type": t} for t in ("null", "integer", "number", "string", "array", "object")]
    + [tagged("cat"), tagged("dog"), {"type": ["string", "integer"]}]
)


@given(st.lists(branch_kinds, min_size=1, max_size=4), values)
def test_the_rewritten_schema_judges_every_value_as_the_original(
    branches: list[Any], value: Any
) -> None:
    schema = {"oneOf": branches}
    verdicts = [jsonschema.Draft202012Validator(s).is_valid(value) for s in (schema, safe(schema))]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"oneOf": [{"type": "integer"}, {"type": "string"}]}},
        {"enum": [{"oneOf": [{"type": "integer"}]}]},
        {"properties": {"oneOf": {"type": "integer"}}},
        {"anyOf": [{}], "oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"properties": {"multipleOf": {"type": "integer"}, "x-guidance": {}}},
    ],
)
def test_names_and_values_that_look_like_keywords_are_left_alone(schema: dict[str, Any]) -> None:
    assert safe(schema) == schema


def test_the_order_of_properties_is_kept() -> None:
    schema: dict[str, Any] = {"properties": {name: {} for name in "zebra"}}
    assert list(safe(schema)["properties"]) == list("zebra")


def test_the_limits_themselves_are_allowed() -> None:
    deep: Any = {}
    for _ in range(SCHEMA_DEPTH_MAX - 1):
        deep = {"not": deep}
    assert safe(deep) == deep
    with pytest.raises(InvalidRequest, match="nested deeper"):
        safe({"not": deep})
    padding = SCHEMA_BYTES_MAX - len(json.dumps({"title": ""}))
    assert safe({"title": "x" * padding})
    with pytest.raises(InvalidRequest, match="bytes long"):
        safe({"title": "x" * (padding + 1)})


def test_what_is_too_long_anyway_is_refused_for_that_before_it_is_looked_into() -> None:
    costly = [{"multipleOf": 50_001 + n} for n in range(SCHEMA_BYTES_MAX // 2)]
    with pytest.raises(InvalidRequest, match="over 131072 bytes long"):
        safe({"allOf": costly})


@pytest.mark.parametrize("divisors", [[0.01] * 500, [5, 10, 60], [0.25, 0.5], [7] * 100, [0, 3]])
def test_ordinary_divisors_are_allowed(divisors: list[float]) -> None:
    schema = {"properties": {str(n): {"multipleOf": d} for n, d in enumerate(divisors)}}
    assert safe(schema) == schema


@pytest.mark.parametrize(
    "divisors", [[50_001], [1234.567], [97, 89, 83], [500] * 101, [1e300], [10**5000], [1e-300, 1]]
)
def test_costly_divisors_are_refused_wherever_a_reference_may_reach_them(
    divisors: list[float],
) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf"):
        safe({"x-shared": [{"multipleOf": divisor} for divisor in divisors]})

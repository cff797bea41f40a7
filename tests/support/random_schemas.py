"""Random JSON schemas of the kinds that clients send, each satisfiable, from one seed."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "a b", "größe", 'quo"te', "value", "kind", "nested")
PATTERNS = ("^[a-z]+$", "^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^-?[0-9]+(\\.[0-9]{1,2})?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def random_schema(seed: int) -> Schema:
    """The same schema for the same seed, nested at most four deep."""
    rng = Random(seed)
    schema = _schema(rng, depth=3)
    return schema if rng.random() < 0.8 else _with_definitions(rng, schema)


def _schema(rng: Random, depth: int) -> Schema:
    leaves: list[Callable[[Random], Schema]] = [_string, _integer, _number, _literal]
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(leaves)(rng)
    kinds: list[Callable[[Random, int], Schema]] = [_object, _object, _array, _any_of, _tagged]
    return rng.choice(kinds)(rng, depth - 1)


def _string(rng: Random) -> Schema:
    low = rng.randint(0, 5)
    bounds: list[Schema] = [
        {},
        {"minLength": low, "maxLength": low + rng.randint(0, 10)},
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(FORMATS)},
    ]
    return {"type": "string", **rng.choice(bounds)}


def _integer(rng: Random) -> Schema:
    low = rng.randint(-1000, 1000)
    bounds: list[Schema] = [
        {},
        {"minimum": low},
        {"exclusiveMaximum": low},
        {"minimum": low, "maximum": low + rng.randint(0, 500)},
        {"multipleOf": rng.randint(1, 60)},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: Random) -> Schema:
    low = rng.randint(-4000, 4000) / 8
    bounds: list[Schema] = [{}, {"minimum": low}, {"minimum": low, "exclusiveMaximum": low + 9.5}]
    return {"type": "number", **rng.choice(bounds)}


def _literal(rng: Random) -> Schema:
    values = ["on", "off", 3, -7, True, None, {"x": [1, "é"]}, [], '\\ "\n']
    choices: list[Schema] = [
        {"type": "boolean"},
        {"type": "null"},
        {"const": rng.choice(values)},
        {"enum": rng.sample(values, rng.randint(1, 4))},
        {"type": ["string", "null"]},
    ]
    return rng.choice(choices)


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "title": "annotations change nothing",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    others = rng.choice([False, False, {"type": "integer"}, None])
    return schema if others is None else {**schema, "additionalProperties": others}


def _array(rng: Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 3)}
    if rng.random() < 0.3:
        prefix = [_schema(rng, depth) for _ in range(2)]
        return {"type": "array", "prefixItems": prefix, "minItems": 2, "items": False}
    return {**schema, "items": _schema(rng, depth)}


def _any_of(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _tagged(rng: Random, depth: int) -> Schema:
    """A discriminated union as pydantic writes it."""
    branches = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": _schema(rng, depth)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind in ("cat", "dog", "eel")
    ]
    return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}


def _with_definitions(rng: Random, leaf: Schema) -> Schema:
    """A tree that refers to itself, with `leaf` at its nodes."""
    node: Schema = {
        "type": "object",
        "properties": {
            "leaf": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["leaf", "next"],
        "additionalProperties": rng.random() < 0.3,
    }
    return {"$defs": {"node": node, "leaf": leaf}, "$ref": "#/$defs/node"}

"""Rope settings as Hugging Face's config.json writes them, in all their spellings.

- before 2024: `rope_theta` beside `rope_scaling: {"type": …}`
- until 2025: `rope_theta` beside `rope_scaling: {"rope_type": …}`
- since Transformers 5: `rope_parameters: {"rope_type": …, "rope_theta": …}`

Formulas and defaults: `modeling_rope_utils.py` of Transformers.
"""

from collections.abc import Mapping

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.model.architecture import Rope, RopeKind
from kvota.model.inventory import unsupported

DEFAULT_THETA = 10000.0
_ALIASES: Mapping[str, str] = {"none": "default", "su": "longrope"}
_SUPPORTED = tuple(kind.value for kind in RopeKind if kind is not RopeKind.FACTORS)
_NEEDS_ORIGINAL = frozenset({RopeKind.LLAMA3, RopeKind.LONGROPE})
_IMPLIES_ORIGINAL = frozenset({RopeKind.YARN, RopeKind.DYNAMIC})
_DERIVES_FACTOR = frozenset({RopeKind.YARN, RopeKind.LONGROPE})


def rope_of(config: Settings, head_size: int, *, theta: float = DEFAULT_THETA) -> Rope:
    """The rope settings of a config. A kind that is not known is refused, never read as plain.

    `theta` is the class's own, for a config that states none.

    Raises UnsupportedModel for the kind, ModelError for a setting that is missing or no number.
    """
    table = _table(config)
    kind = _kind(table)
    original = _original_max_position(config, table, kind)
    is_llama3 = kind is RopeKind.LLAMA3
    is_longrope = kind is RopeKind.LONGROPE
    part = _in_or_beside(table, config, "partial_rotary_factor", 1.0)
    if part > 1.0:
        raise table.wrong("partial_rotary_factor", "above 0 and at most 1")
    rotary_dim = int(head_size * part)
    return Rope(
        theta=_in_or_beside(table, config, "rope_theta", theta),
        kind=kind,
        factor=_factor(config, table, kind, original),
        original_max_position=original,
        low_freq_factor=table.positive("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=table.positive("high_freq_factor") if is_llama3 else 4.0,
        beta_fast=table.optional_real("beta_fast") or 32.0,
        beta_slow=table.optional_real("beta_slow") or 1.0,
        attention_factor=table.optional_real("attention_factor"),
        mscale=table.optional_real("mscale"),
        mscale_all_dim=table.optional_real("mscale_all_dim"),
        short_factors=table.reals("short_factor") if is_longrope else (),
        long_factors=table.reals("long_factor") if is_longrope else (),
        rotary_dim=None if rotary_dim == head_size else rotary_dim,
    )


def max_position_of(config: Settings, rope: Rope) -> int:
    """The longest context the rope settings are good for.

    yarn and dynamic define `factor` as the stretch of the original length, so it is their product;
    llama3, longrope and linear state the final length themselves.
    """
    if rope.kind in _IMPLIES_ORIGINAL and rope.original_max_position is not None:
        return stretched(rope)
    return config.whole("max_position_embeddings")


def stretched(rope: Rope) -> int:
    """`factor` times the original length; no more than what `check_sizes` refuses."""
    return int(min(rope.factor * (rope.original_max_position or 1), 2.0**62))


def _table(config: Settings) -> Settings:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.get(name) or {}
    if not isinstance(values, Mapping):
        raise config.wrong(name, "a table")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise unsupported(config.origin, f"{name} that differ between layers.", ["one for all"])
    return Settings(values, config.origin, where=f"{name}: ")


def _kind(table: Settings) -> RopeKind:
    stated = [value for name in ("type", "rope_type") if (value := table.get(name)) is not None]
    names = {_ALIASES.get(str(value), str(value)) for value in stated or ["default"]}
    if len(names) > 1:
        raise ModelError(
            f"{table.origin}: rope settings name two kinds, {' and '.join(sorted(names))}."
        )
    name = names.pop()
    if name not in _SUPPORTED:
        raise unsupported(table.origin, f"rope scaling {name!r} is not supported.", _SUPPORTED)
    if not table.flag("truncate", True):
        raise unsupported(table.origin, "rope scaling with truncate = false.", ["truncate = true"])
    return RopeKind(name)


def _original_max_position(config: Settings, table: Settings, kind: RopeKind) -> int | None:
    """What the model was trained on before stretching; yarn and dynamic may leave it to the config.

    Phi's checkpoints state it beside the rope settings, all others among them.
    """
    name = "original_max_position_embeddings"
    if kind in _IMPLIES_ORIGINAL | _NEEDS_ORIGINAL:
        for place in (table, config):
            if place.get(name) is not None:
                return int(place.positive(name))
        if kind in _NEEDS_ORIGINAL:
            raise table.wrong(name, f"the length before stretching, for rope scaling {kind.value}")
        return config.whole("max_position_embeddings")
    return None


def _factor(config: Settings, table: Settings, kind: RopeKind, original: int | None) -> float:
    """`factor`, or what the two lengths say where Transformers derives it from them."""
    if kind is RopeKind.PLAIN:
        return 1.0
    if table.get("factor") is None and kind in _DERIVES_FACTOR and original is not None:
        return config.whole("max_position_embeddings") / original
    return table.positive("factor")


def _in_or_beside(table: Settings, config: Settings, name: str, default: float) -> float:
    """A number that newer files keep in the rope table and older ones beside it."""
    place = config if table.get(name) is None else table
    return place.positive(name, default)

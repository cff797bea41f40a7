import pytest

from kvota.core.errors import ConfigError
from kvota.kv.layout import CacheType, KVLayout

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_kv_heads", "cache_type", "bytes_per_token"),
    [(8, CacheType.F16, 131_072), (32, CacheType.F16, 524_288), (8, CacheType.F8, 65_536)],
)
def test_only_kv_heads_count(
    num_kv_heads: int, cache_type: CacheType, bytes_per_token: int
) -> None:
    layout = KVLayout(
        num_layers=32, num_kv_heads=num_kv_heads, head_size=128, cache_type=cache_type
    )
    assert layout.bytes_per_token == bytes_per_token


def test_8192_tokens_of_an_8b_llama_take_exactly_one_gibibyte() -> None:
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_size=128)
    assert layout.bytes_per_block(8192) == GIB


@pytest.mark.parametrize(("num_layers", "bytes_per_token"), [(36, 147_456), (10, 40_960)])
def test_the_stated_head_size_counts_not_hidden_over_heads(
    num_layers: int, bytes_per_token: int
) -> None:
    layout = KVLayout(num_layers=num_layers, num_kv_heads=8, head_size=128)
    assert layout.bytes_per_token == bytes_per_token


def test_the_default_model_takes_23040_bytes_per_token() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_size=64)
    assert layout.bytes_per_token == 23_040
    assert layout.bytes_per_block(32) == 737_280


def test_u8_adds_a_scale_and_a_zero_point_to_each_row() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_size=64, cache_type=CacheType.U8)
    assert layout.bytes_per_token == 30 * 3 * 2 * (64 + 8)


@pytest.mark.parametrize(("devices", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_split_over_devices_and_repeated_when_there_are_more_devices(
    devices: int, heads: int
) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=devices)
    assert layout.bytes_per_token == heads * 2 * 128 * 2


def test_heads_that_cannot_be_spread_evenly_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="8 KV heads cannot be spread over 3 devices"):
        KVLayout(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=3)


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVLayout(num_layers=0, num_kv_heads=8, head_size=128)


def test_cache_types_are_found_by_the_name_that_settings_use() -> None:
    assert [CacheType.named(name) for name in ("f32", "f16", "f8", "u8")] == list(CacheType)
    with pytest.raises(ConfigError, match="'u4'; use one of f32, f16, f8, u8"):
        CacheType.named("u4")

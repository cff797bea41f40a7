import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    layout = KVLayout.uniform(
        num_layers=32, num_kv_heads=num_kv_heads, head_size=128, cache_type=cache_type
    )
    assert layout.bytes_per_token == bytes_per_token


def test_8192_tokens_of_an_8b_llama_take_exactly_one_gibibyte() -> None:
    layout = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_size=128)
    assert layout.sequence_bytes(8192) == GIB


@pytest.mark.parametrize(("num_layers", "bytes_per_token"), [(36, 147_456), (10, 40_960)])
def test_the_stated_head_size_counts_not_hidden_over_heads(
    num_layers: int, bytes_per_token: int
) -> None:
    layout = KVLayout.uniform(num_layers=num_layers, num_kv_heads=8, head_size=128)
    assert layout.bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes"), [(1, 983_040), (1024, 1_006_632_960), (4096, 1_509_949_440)]
)
def test_windowed_layers_stop_growing_at_their_window(num_tokens: int, num_bytes: int) -> None:
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(60))
    layout = KVLayout(windows=windows, num_kv_heads=16, head_size=256)
    assert layout.sequence_bytes(num_tokens) == num_bytes


def test_the_default_model_takes_23040_bytes_per_token() -> None:
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_size=64)
    assert layout.bytes_per_token == 23_040
    assert layout.bytes_per_block(32) == 737_280


def test_u8_adds_a_scale_and_a_zero_point_to_each_row() -> None:
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_size=64, cache_type=CacheType.U8)
    assert layout.bytes_per_token == 30 * 3 * 2 * (64 + 8)


@pytest.mark.parametrize(("devices", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_split_over_devices_and_repeated_when_there_are_more_devices(
    devices: int, heads: int
) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=devices)
    assert layout.bytes_per_token == heads * 2 * 128 * 2


def test_heads_that_cannot_be_spread_evenly_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="8 KV heads cannot be spread over 3 devices"):
        KVLayout.uniform(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=3)


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVLayout.uniform(num_layers=0, num_kv_heads=8, head_size=128)


def test_cache_types_are_found_by_the_name_that_settings_use() -> None:
    assert [CacheType.named(name) for name in ("f32", "f16", "f8", "u8")] == list(CacheType)
    with pytest.raises(ConfigError, match="'u4'; use one of f32, f16, f8, u8"):
        CacheType.named("u4")


@given(st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_a_sequence_never_needs_more_than_its_tokens_at_full_price(
    windows: list[int | None], num_tokens: int
) -> None:
    layout = KVLayout(windows=windows, num_kv_heads=2, head_size=4)
    spent = layout.sequence_bytes(num_tokens)
    assert spent <= num_tokens * layout.bytes_per_token
    if all(window is None for window in windows):
        assert spent == num_tokens * layout.bytes_per_token

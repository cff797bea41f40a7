"""Published and reported figures; the entries of I are bug reports against other planners."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.kv.layout import CacheType, HeadKV, KVLayout, LatentKV, LayerGroup

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
    assert layout.bytes_per_block(8192) == GIB
    assert 32 * layout.bytes_of(8192) == 32 * GIB


@pytest.mark.parametrize(("num_layers", "bytes_per_token"), [(36, 147_456), (10, 40_960)])
def test_the_stated_head_size_counts_not_hidden_over_heads(
    num_layers: int, bytes_per_token: int
) -> None:
    layout = KVLayout.uniform(num_layers=num_layers, num_kv_heads=8, head_size=128)
    assert layout.bytes_per_token == bytes_per_token


def test_the_default_model_takes_23040_bytes_per_token() -> None:
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_size=64)
    assert layout.bytes_per_token == 23_040
    assert layout.bytes_per_block(32) == 737_280


def test_u8_adds_a_scale_and_a_zero_point_to_each_row() -> None:
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_size=64, cache_type=CacheType.U8)
    assert layout.bytes_per_token == 30 * 3 * 2 * (64 + 8)


def test_keys_and_values_may_have_different_sizes() -> None:
    layout = KVLayout(groups=(LayerGroup(HeadKV(4, 192, 128), 2),))
    assert layout.bytes_per_token == 2 * 4 * (192 + 128) * 2


@pytest.mark.parametrize(("devices", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_split_over_devices_and_repeated_when_there_are_more_devices(
    devices: int, heads: int
) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=devices)
    assert layout.bytes_per_token == heads * 2 * 128 * 2


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_i03_every_device_holds_the_whole_latent_row(devices: int) -> None:
    layout = KVLayout(groups=(LayerGroup(LatentKV(512, 64), 27),), tensor_parallel=devices)
    assert layout.bytes_per_token == 31_104


def test_deepseek_v3_takes_70272_bytes_per_token() -> None:
    layout = KVLayout(groups=(LayerGroup(LatentKV(512, 64), 61),))
    assert layout.bytes_per_token == 576 * 2 * 61 == 70_272


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes"), [(1, 983_040), (1024, 1_006_632_960), (4096, 1_509_949_440)]
)
def test_i04_layers_with_a_window_keep_its_tokens_only(num_tokens: int, num_bytes: int) -> None:
    heads = HeadKV(16, 256, 256)
    layout = KVLayout(groups=(LayerGroup(heads, 10), LayerGroup(heads, 50, window=1024)))
    assert layout.bytes_of(num_tokens) == num_bytes
    assert layout.bytes_per_block(4096) == 4_026_531_840


@pytest.mark.parametrize(
    ("tensor_parallel", "pipeline_parallel", "share"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4)]
)
def test_i05_only_tensor_and_pipeline_parallel_make_a_request_smaller(
    tensor_parallel: int, pipeline_parallel: int, share: int
) -> None:
    layout = KVLayout(
        groups=(LayerGroup(HeadKV(8, 128, 128), 32),),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    assert layout.bytes_of(8192) == GIB // share


def test_the_stage_with_most_layers_counts() -> None:
    group = LayerGroup(HeadKV(1, 8, 8), 5)
    assert KVLayout(groups=(group,), pipeline_parallel=2).bytes_per_token == 3 * 32


@settings(deadline=None)
@given(
    tokens=st.integers(1, 10_000),
    window=st.integers(1, 5_000),
    full=st.integers(1, 20),
    sliding=st.integers(1, 20),
)
def test_a_sequence_grows_by_at_most_one_token_of_all_layers(
    tokens: int, window: int, full: int, sliding: int
) -> None:
    heads = HeadKV(2, 16, 16)
    layout = KVLayout(groups=(LayerGroup(heads, full), LayerGroup(heads, sliding, window)))
    grown = layout.bytes_of(tokens + 1) - layout.bytes_of(tokens)
    assert grown == (full + (sliding if tokens < window else 0)) * 2 * 2 * 16 * 2
    assert layout.bytes_of(tokens) <= layout.bytes_per_block(tokens)


def test_heads_that_cannot_be_spread_evenly_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="8 KV heads cannot be spread over 3 devices"):
        KVLayout.uniform(num_layers=1, num_kv_heads=8, head_size=128, tensor_parallel=3)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be spread over 3 stages"):
        KVLayout(groups=(LayerGroup(HeadKV(1, 8, 8), 2),), pipeline_parallel=3)


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVLayout.uniform(num_layers=0, num_kv_heads=8, head_size=128)
    with pytest.raises(ConfigError, match="at least 1"):
        KVLayout.uniform(num_layers=1, num_kv_heads=0, head_size=128)
    with pytest.raises(ConfigError, match="at least 1 group"):
        KVLayout(groups=())
    with pytest.raises(ConfigError, match="at least 1 token"):
        LayerGroup(LatentKV(512, 64), 1, window=0)


def test_cache_types_are_found_by_the_name_that_settings_use() -> None:
    assert [CacheType.named(name) for name in ("f32", "f16", "f8", "u8")] == list(CacheType)
    with pytest.raises(ConfigError, match="'u4'; use one of f32, f16, f8, u8"):
        CacheType.named("u4")

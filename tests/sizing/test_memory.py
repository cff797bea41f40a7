from pathlib import Path
from typing import Any

import psutil
import pytest

from kvota.core.errors import InsufficientMemory
from kvota.sizing.memory import ACTIVATION_RESERVE_BYTES, draw_bill, memory_limit, parse_size, size

GB = 10**9


def bill(**changes: Any) -> Any:
    figures: dict[str, Any] = {
        "limit_bytes": 10 * GB + ACTIVATION_RESERVE_BYTES,
        "limit_from": "test",
        "used_bytes": 2 * GB,
        "weights_bytes": 1 * GB,
        "kv_budget_ratio": 0.5,
        "kv_memory_bytes": None,
        "block_size": 32,
        "bytes_per_block": 1_000_000,
        "max_model_len": 4096,
    }
    return draw_bill(**(figures | changes))


def test_the_budget_is_what_is_left_times_the_ratio() -> None:
    drawn = bill()
    assert drawn.kv_budget_bytes == 4 * GB
    assert drawn.num_blocks == 4000
    assert drawn.num_tokens == 128_000
    assert drawn.num_requests(4096) == 31
    assert drawn.num_requests(33) == 2000


def test_a_budget_fixed_by_hand_is_kept() -> None:
    assert bill(kv_memory_bytes=GB).kv_budget_bytes == GB


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(InsufficientMemory, match=r"asks for 9 GB, but 8 GB are left"):
        bill(kv_memory_bytes=9 * GB)


def test_too_little_for_one_request_names_the_three_knobs() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        bill(kv_memory_bytes=100_000_000)
    said = caught.value.message
    assert "holds 3,200 tokens" in said
    assert "--max-model-len" in said
    assert "--kv-cache-dtype" in said
    assert "--kv-memory" in said


def test_the_longest_requests_that_would_fit_are_told() -> None:
    with pytest.raises(InsufficientMemory, match=r"--max-model-len of at most 3,200,"):
        bill(kv_memory_bytes=100_000_000)


def test_where_the_model_alone_is_too_large_no_knob_of_the_kv_cache_is_offered() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        bill(limit_bytes=GB)
    said = caught.value.message
    assert "1 GB (test)" in said
    assert "2 GB" in said
    assert "--weights" in said
    assert "larger container" in said
    assert "--max-model-len" not in said
    assert "--kv-cache-dtype" not in said


def test_the_bill_adds_up_for_a_reader() -> None:
    amounts = [amount for amount, _, _ in bill().lines()]
    assert amounts == ["10.5 GB", "− 2 GB", "− 500 MB", "= 4 GB", "4,000", "93"]


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_limit_is_respected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("50000000\n")
    assert memory_limit(tmp_path) == (50_000_000, "the container's limit")


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("1:cpu:/\n0::/system.slice/kvota.service\n", "system.slice/kvota.service/memory.max"),
        ("0::/system.slice/kvota.service\n", "system.slice/memory.max"),
        ("9:cpu:/x\n4:memory,hugetlb:/a/b\n", "memory/a/b/memory.limit_in_bytes"),
        ("4:memory:/a/b\n", "memory/a/memory.limit_in_bytes"),
    ],
)
def test_a_services_own_limit_and_those_above_it_are_respected(
    tmp_path: Path, own: str, name: str
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("50000000\n")
    assert memory_limit(tmp_path, tmp_path / "own") == (50_000_000, "this service's limit")


def test_another_services_limit_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "a/c").mkdir(parents=True)
    (tmp_path / "a/c/memory.max").write_text("50000000\n")
    assert memory_limit(tmp_path, tmp_path / "own")[1] == "free on this machine"


def test_no_container_limit_means_what_the_machine_has_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    limit, source = memory_limit(tmp_path)
    assert 0 < limit <= psutil.virtual_memory().total
    assert source == "free on this machine"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (737_280, "737 KB"), (1_534_000_000, "1.53 GB")]
)
def test_sizes_read_well(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1024", 1024), ("2GiB", 2**31), ("800 MB", 800_000_000), ("1.5g", 1_500_000_000)],
)
def test_sizes_are_read_with_their_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text, "kv_memory") == num_bytes

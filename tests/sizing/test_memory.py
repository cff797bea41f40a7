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


@pytest.mark.parametrize(
    ("names", "stat"),
    [
        (
            ("memory.max", "memory.current", "memory.stat"),
            "active_file 2000000000\ninactive_file 1000000000\nslab_reclaimable 500000000\n",
        ),
        (
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "memory/memory.stat",
            ),
            "active_file 7\ntotal_active_file 2500000000\ntotal_inactive_file 1000000000\n",
        ),
    ],
)
def test_what_others_in_the_container_hold_is_not_ours_to_use(
    tmp_path: Path, names: tuple[str, str, str], stat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = psutil.virtual_memory()._replace(total=64 * GB, available=60 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: roomy)
    limit, current, stat_file = (tmp_path / name for name in names)
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{20 * GB}\n")
    stat_file.write_text(stat)

    current.write_text(f"{3 * GB}\n")  # less than the pages of files: nobody else is there
    assert memory_limit(tmp_path) == (20 * GB, "the container's limit")

    current.write_text(f"{11 * GB + GB // 2}\n")  # of files 3.5 GB; 8 GB are ours or others'
    usable, source = memory_limit(tmp_path)
    assert 12 * GB < usable < 14 * GB  # the tests' own process takes part of the 8 GB
    less, _, rest = source.removeprefix("the container's limit, less ").partition(" GB that ")
    assert float(less) == pytest.approx((20 * GB - usable) / GB, abs=0.01)
    assert rest == "others hold"


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

"""Counting cores against fake cgroup trees."""

import os
from pathlib import Path

import pytest

from kvota.model.threads import usable_cores

ALLOWED = len(os.sched_getaffinity(0))


def test_without_a_quota_every_allowed_core_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALLOWED
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == ALLOWED


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (100_000, 1), (6_400_000, ALLOWED)])
def test_a_quota_limits_them(quota: int, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_cores(tmp_path) == cores


def test_a_fraction_counts_as_one_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert usable_cores(tmp_path) == 3


def test_an_old_cgroup_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 8), ("200000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert usable_cores(tmp_path) == cores


def test_the_quota_of_a_service_or_of_its_slice_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    service = tmp_path / "tree" / "kvota.slice" / "kvota.service"
    service.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/kvota.slice/kvota.service\n")
    (service / "cpu.max").write_text("400000 100000\n")
    assert usable_cores(tmp_path / "tree", own) == 4
    (service.parent / "cpu.max").write_text("200000 100000\n")
    assert usable_cores(tmp_path / "tree", own) == 2
    own.write_text("3:cpuacct,cpu:/other\n0::/\n")
    assert usable_cores(tmp_path / "tree", own) == 8

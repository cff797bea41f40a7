import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvota.model import huge_pages
from kvota.model.huge_pages import gather, gather_weights, huge_page_size, keep_small, linux

MIB = 2**20
HUGE = 2 * MIB
SMALL = mmap.PAGESIZE
MAPS = """\
00400000-00c00000 r-xp 00000000 fe:00 1234    /usr/bin/python3
01000000-01800000 rw-p 00000000 00:00 0       [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0001000000-7f0001200000 rw-p 00000000 00:00 0   [anon:kv]
7f0002000000-7f0002800000 rw-s 00000000 00:01 0
7f0003000000-7f0003800000 rw-p 00000000 fe:00 99  /tmp/weights
7f0004000000-7f0004800000 r--p 00000000 00:00 0
7f0005000000-7f0005100000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0   [stack]
"""
MINE = [(0x1000000, 8 * MIB), (0x7F0000200000, 6 * MIB), (0x7F0001000000, 2 * MIB)]


class FakeKernel:
    """Every page takes memory but those in `holes`. Remembers what it was asked to do."""

    def __init__(self, refused: int | None = None, holes: range = range(0)) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._refused = refused
        self._holes = holes

    def advise(self, start: int, length: int, advice: int) -> bool:
        self.calls.append((start, length, advice))
        return start != self._refused

    def resident(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        addresses = np.arange(start, start + length, SMALL)
        return (addresses < self._holes.start) | (addresses >= self._holes.stop)


def test_whole_huge_pages_of_private_memory_are_gathered_and_nothing_else() -> None:
    kernel = FakeKernel()
    assert gather(MAPS.splitlines(), HUGE, kernel) == 16 * MIB
    assert kernel.calls == [(*part, advice) for part in MINE for advice in (14, 25)]


def test_what_the_kernel_refuses_is_not_counted_and_stops_nothing() -> None:
    kernel = FakeKernel(refused=MINE[0][0])
    assert gather(MAPS.splitlines(), HUGE, kernel) == 8 * MIB
    assert len(kernel.calls) == 6


def test_memory_that_was_given_back_is_not_taken_again() -> None:
    """A huge page with a hole stays as it is, its neighbours do not."""
    start, length = MINE[0]
    second = start + HUGE
    kernel = FakeKernel(holes=range(second, second + SMALL))
    [line] = [line for line in MAPS.splitlines() if "[heap]" in line]
    assert gather([line], HUGE, kernel) == length - HUGE
    assert [call[:2] for call in kernel.calls[::2]] == [
        (start, HUGE),
        (second + HUGE, length - 2 * HUGE),
    ]


def test_small_pages_are_asked_for_within_the_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(huge_pages, "linux", lambda: kernel)
    keep_small(SMALL + 64, 3 * SMALL)
    keep_small(SMALL + 64, SMALL)
    assert kernel.calls == [(2 * SMALL, 2 * SMALL, 15)]


def test_a_system_without_huge_pages_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(huge_pages, "linux", lambda: kernel)
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: 0)
    assert gather_weights() == 0
    assert not kernel.calls


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_really_moves_to_huge_pages() -> None:
    kernel = linux()
    if kernel is None or not huge_page_size() or "[never]" in _setting("enabled"):
        pytest.skip("this system has no transparent huge pages")
    with mmap.mmap(-1, 8 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        del view
        gathered = gather([_mapping_of(start)], huge_page_size(), kernel)
        if not gathered:
            pytest.skip("the kernel does not gather now: before Linux 6.1, or memory in pieces")
        assert _huge_bytes(start) >= gathered >= 6 * HUGE
        assert memory[:] == b"x" * len(memory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_was_never_touched_is_seen_as_such() -> None:
    kernel = linux()
    assert kernel is not None
    with mmap.mmap(-1, 8 * SMALL, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[SMALL] = 1
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        del view
        assert kernel.resident(start, len(memory)).tolist() == [False, True] + 6 * [False]


def _setting(name: str) -> str:
    return (Path("/sys/kernel/mm/transparent_hugepage") / name).read_text()


def _mapping_of(address: int) -> str:
    """Its line in /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return line
    raise AssertionError("no such mapping")


def _huge_bytes(address: int) -> int:
    """Of the mapping at `address`, what is in huge pages."""
    wanted, _, _ = _mapping_of(address).partition(" ")
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(wanted):
            inside = True
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from kvota.model import huge_pages
from kvota.model.huge_pages import gather, gather_weights, keep_small

MIB = 2**20
HUGE = 2 * MIB
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


class Kernel:
    """Answers madvise, and remembers what was asked of it."""

    def __init__(self, refused: int | None = None) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._refused = refused

    def __call__(self, start: int, length: int, advice: int, /) -> int:
        self.calls.append((start, length, advice))
        return -1 if start == self._refused else 0


def test_whole_huge_pages_of_private_memory_are_gathered_and_nothing_else() -> None:
    kernel = Kernel()
    assert gather(MAPS.splitlines(), HUGE, kernel) == 16 * MIB
    assert kernel.calls == [(*part, advice) for part in MINE for advice in (14, 25)]


def test_what_the_kernel_refuses_is_not_counted_and_stops_nothing() -> None:
    kernel = Kernel(refused=MINE[0][0])
    assert gather(MAPS.splitlines(), HUGE, kernel) == 8 * MIB
    assert len(kernel.calls) == 6


def test_small_pages_are_asked_for_within_the_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(huge_pages, "_madvise", lambda: kernel)
    keep_small(4096 + 64, 3 * 4096)
    keep_small(4096 + 64, 4096)
    assert kernel.calls == [(2 * 4096, 2 * 4096, 15)]


def test_a_system_without_huge_pages_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_huge_page_size", lambda: 0)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: pytest.fail)
    assert gather_weights() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_really_moves_to_huge_pages() -> None:
    if not huge_pages._huge_page_size() or "[never]" in _setting("enabled"):
        pytest.skip("this system has no transparent huge pages")
    with mmap.mmap(-1, 8 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        del view
        advise = huge_pages._madvise()
        assert advise is not None
        gathered = gather([_mapping_of(start)], huge_pages._huge_page_size(), advise)
        if not gathered:
            pytest.skip("the kernel does not gather now: before Linux 6.1, or memory in pieces")
        assert _huge_bytes(start) >= gathered >= 6 * HUGE
        assert memory[:] == b"x" * len(memory)


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

"""Weights in huge pages, KV in small ones.

Every step reads all weights once, one after another. In pages of 4 KiB that is 35,000 translations
of addresses for SmolLM2-135M, and the processor reads ahead within a page only. In pages of 2 MiB
steps of 1, 4, 16 and 64 sequences are 15, 14, 7 and 1 % faster (a virtual machine, AMD EPYC).

Where the system gives huge pages to those who ask (`transparent_hugepage` is `madvise`, as on most
servers), nobody asks for the plugin's packed weights. So once they are there the kernel is asked to
put them together (MADV_COLLAPSE, Linux 6.1; older ones do it by and by, in the background).

Only what is full is put together: a huge page that is used in part would take the rest of its 2 MiB
as well, and the bill would be higher by up to a sixth.

For KV the opposite holds. Its blocks lie scattered and are filled one by one: huge pages made steps
of 64 sequences 9 % slower there, and the first block of each layer would take 2 MiB at once.

Whatever the kernel refuses stays as it was, only slower.
"""

import ctypes
import mmap
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

_HUGE, _SMALL, _TOGETHER = 14, 15, 25  # MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE
_HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PAGE = mmap.PAGESIZE
# start-end rw-p offset device inode path: memory of this process alone, of no file.
_PRIVATE = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ [0-9a-f:]+ 0 *(\[heap\]|\[anon:.*)?$"
)


class Kernel(Protocol):
    """What is asked of the system. Addresses and lengths are whole pages, in bytes."""

    def advise(self, start: int, length: int, advice: int) -> bool:
        """madvise(2); whether it was taken."""

    def resident(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        """mincore(2): which of the small pages take memory. Empty where that is not known."""


def gather(maps: Iterable[str], page_size: int, kernel: Kernel) -> int:
    """Put private memory in huge pages where it fills them; how many bytes went there.

    `maps`: the lines of /proc/self/maps.
    """
    gathered = 0
    for start, length in _full(maps, page_size, kernel):
        kernel.advise(start, length, _HUGE)
        if kernel.advise(start, length, _TOGETHER):
            gathered += length
    return gathered


def gather_weights() -> int:
    """Put what this process holds now in huge pages; the bytes, 0 where there are none."""
    kernel, page_size = linux(), huge_page_size()
    if kernel is None or not page_size:
        return 0
    return gather(Path("/proc/self/maps").read_text().splitlines(), page_size, kernel)


def keep_small(start: int, num_bytes: int) -> None:
    """Ask for small pages for `num_bytes` from the address `start` on."""
    kernel = linux()
    first, end = -(-start // _PAGE) * _PAGE, (start + num_bytes) // _PAGE * _PAGE
    if kernel is not None and end > first:
        kernel.advise(first, end - first, _SMALL)


def _full(maps: Iterable[str], page_size: int, kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Start and length of every run of huge pages that would be full."""
    for start, length in _whole_pages(maps, page_size):
        resident = kernel.resident(start, length)
        if not resident.size:
            continue
        is_full = resident.reshape(-1, page_size // _PAGE).all(axis=1)
        edges = np.flatnonzero(np.diff(is_full, prepend=False, append=False))
        for first, end in edges.reshape(-1, 2).tolist():
            yield start + first * page_size, (end - first) * page_size


def _whole_pages(maps: Iterable[str], page_size: int) -> Iterator[tuple[int, int]]:
    """Start and length of what each private mapping has of whole huge pages."""
    for line in maps:
        if found := _PRIVATE.match(line):
            first = -(-int(found[1], 16) // page_size) * page_size
            end = int(found[2], 16) // page_size * page_size
            if end > first:
                yield first, end - first


@cache
def huge_page_size() -> int:
    """Bytes; 0 where the system has no huge pages."""
    try:
        return int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class _Linux:
    libc: ctypes.CDLL

    def advise(self, start: int, length: int, advice: int) -> bool:
        where, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        return bool(self.libc.madvise(where, size, ctypes.c_int(advice)) == 0)

    def resident(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        pages = np.zeros(length // _PAGE, np.uint8)
        where, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        answer = self.libc.mincore(where, size, ctypes.c_void_p(pages.ctypes.data))
        return (pages & 1).astype(bool) if answer == 0 else np.zeros(0, bool)


@cache
def linux() -> Kernel | None:
    """The kernel of this system, where it is one that has both calls."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return _Linux(libc) if hasattr(libc, "madvise") and hasattr(libc, "mincore") else None

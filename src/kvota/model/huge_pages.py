"""Weights in huge pages, KV in small ones.

Every step reads all weights once, one after another. In pages of 4 KiB that is 35,000 translations
of addresses for SmolLM2-135M, and the processor reads ahead within a page only. In pages of 2 MiB a
step of one sequence takes a tenth less time (a virtual machine, AMD EPYC; full batches: the same).

Where the system gives huge pages to those who ask (`transparent_hugepage` is `madvise`, as on most
servers), nobody asks for the plugin's packed weights. So once they are there the kernel is asked to
put them together (MADV_COLLAPSE, Linux 6.1; older ones do it by and by, in the background).

For KV the opposite holds. Its blocks lie scattered and are filled one by one: huge pages made steps
of 64 sequences 9 % slower there, and the first block of each layer would take 2 MiB at once.

Whatever the kernel refuses stays as it was, only slower.
"""

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

_HUGE, _SMALL, _TOGETHER = 14, 15, 25  # MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE
_HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PAGE = 4096
# start-end rw-p offset device inode path: memory of this process alone, of no file.
_PRIVATE = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ [0-9a-f:]+ 0 *(\[heap\]|\[anon:.*)?$"
)


class Advise(Protocol):
    """madvise(2): start and length in bytes, both whole pages. 0 when it was taken."""

    def __call__(self, start: int, length: int, advice: int, /) -> int: ...


def gather(maps: Iterable[str], page_size: int, advise: Advise) -> int:
    """Put all private memory in huge pages; how many bytes of it are in them now.

    `maps`: the lines of /proc/self/maps.
    """
    gathered = 0
    for start, end in _whole_pages(maps, page_size):
        advise(start, end - start, _HUGE)
        if advise(start, end - start, _TOGETHER) == 0:
            gathered += end - start
    return gathered


def gather_weights() -> int:
    """Put what this process holds now in huge pages; the bytes, 0 where there are none."""
    advise, page_size = _madvise(), _huge_page_size()
    if advise is None or not page_size:
        return 0
    return gather(Path("/proc/self/maps").read_text().splitlines(), page_size, advise)


def keep_small(start: int, num_bytes: int) -> None:
    """Ask for small pages for `num_bytes` from the address `start` on."""
    advise = _madvise()
    first, end = -(-start // _PAGE) * _PAGE, (start + num_bytes) // _PAGE * _PAGE
    if advise is not None and end > first:
        advise(first, end - first, _SMALL)


def _whole_pages(maps: Iterable[str], page_size: int) -> Iterator[tuple[int, int]]:
    """Start and end of what each private mapping has of whole huge pages."""
    for line in maps:
        if found := _PRIVATE.match(line):
            first = -(-int(found[1], 16) // page_size) * page_size
            end = int(found[2], 16) // page_size * page_size
            if end > first:
                yield first, end


@cache
def _huge_page_size() -> int:
    """Bytes; 0 where the system has no huge pages."""
    try:
        return int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0


@cache
def _madvise() -> Advise | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function  # type: ignore[no-any-return]

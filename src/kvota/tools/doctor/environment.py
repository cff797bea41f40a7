"""Whether a machine is fit to serve: facts in, findings out. Pure.

The bounds are rules of thumb, each with its reason beside it; none of them stops a server.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final

from kvota.sizing.memory import size
from kvota.tools.doctor.finding import Finding, Level, ok
from kvota.tools.doctor.machine import Cores, Folder, Library, Machine, Memory

GIB: Final = 2**30
MEMORY_LEAST: Final = 1 * GIB  # the smallest known model with its cache and the runtime's reserve
MEMORY_FINE: Final = 4 * GIB
DISK_LEAST: Final = 200 * 2**20  # the default model is 98 MB
DISK_FINE: Final = 10 * GIB  # a 7B model in 8 bits
FILES_LEAST: Final = 256
FILES_FINE: Final = 4096  # a stream holds a socket; a gateway two
SWAP_FINE: Final = GIB
THROTTLED_FINE: Final = 0.05  # of the scheduler's periods
PYTHON_LEAST: Final = (3, 11)
SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "pit"})  # a system call each
BUILT_UNIX_S: Final = 1_750_000_000.0  # June 2025: no clock can be right that shows less


def examine(machine: Machine) -> list[Finding]:
    """One finding or more for every fact, whatever its level."""
    return [
        *_memory(machine.memory),
        _folder(machine.cache),
        _files(machine.files_soft, machine.files_hard),
        *_cores(machine.cores),
        _instructions(machine.cores),
        _python(machine.python),
        _libraries(machine.libraries),
        _port(machine.port, machine.port_error),
        _clock(machine.unix_s, machine.clock_source),
    ]


def _memory(memory: Memory) -> Iterable[Finding]:
    said = f"{size(memory.usable)} usable ({memory.usable_from})"
    if memory.usable >= MEMORY_FINE:
        yield ok("memory", said)
    else:
        is_tight = memory.usable >= MEMORY_LEAST
        yield Finding(
            name="memory",
            level=Level.NOTE if is_tight else Level.PROBLEM,
            said=said,
            means="room for a small model and few requests at once"
            if is_tight
            else "too little for any known model with its KV cache",
            change="a larger container limit, or `--weights int4 --kv-cache-dtype u8`; "
            "`kvota plan` says what a model needs",
        )
    if memory.num_oom_kills:
        yield Finding(
            name="killed for memory",
            level=Level.PROBLEM,
            said=f"{memory.num_oom_kills} processes of this container",
            means="something in it asks for more than its limit; the kernel ends it without a word",
            change="a larger limit, or a smaller kv_budget_ratio",
            source="memory.events",
        )
    if memory.swap_used > SWAP_FINE:
        yield Finding(
            name="swap",
            level=Level.NOTE,
            said=f"{size(memory.swap_used)} in use",
            means="a step that meets swapped weights takes seconds",
            change="stop what else needs memory, or `swapoff -a`",
        )


def _folder(cache: Folder) -> Finding:
    if cache.error is not None:
        return Finding(
            name="model cache",
            level=Level.PROBLEM,
            said=f"{cache.path}: {cache.error}",
            means="no model can be fetched",
            change="KVOTA_CACHE_DIR or --cache-dir: a folder that this user may write to",
        )
    said = f"{size(cache.free_bytes)} free for {cache.path}"
    if cache.free_bytes >= DISK_FINE:
        return ok("model cache", said)
    is_tight = cache.free_bytes >= DISK_LEAST
    return Finding(
        name="model cache",
        level=Level.NOTE if is_tight else Level.PROBLEM,
        said=said,
        means="a larger model does not fit" if is_tight else "no model fits",
        change="`kvota models remove NAME`, or KVOTA_CACHE_DIR on another disk",
    )


def _files(soft: int | None, hard: int | None) -> Finding:
    if soft is None or soft >= FILES_FINE:
        return ok("open files", "no limit" if soft is None else f"{soft:,}")
    reach = "any" if hard is None else f"up to {hard:,}"
    return Finding(
        name="open files",
        level=Level.NOTE if soft >= FILES_LEAST else Level.PROBLEM,
        said=f"{soft:,} for this process",
        means=f"every open stream takes one, behind a gateway two: about {soft // 2:,} clients",
        change=f"`ulimit -n 65536` (this user may set {reach}), or LimitNOFILE= of the service",
    )


def _cores(cores: Cores) -> Iterable[Finding]:
    usable = usable_threads(cores)
    limit = "" if cores.quota is None else f", the container gets the time of {cores.quota:g}"
    yield ok("cores", f"{usable} usable ({cores.allowed} allowed{limit})")
    if cores.throttled_share > THROTTLED_FINE:
        yield Finding(
            name="throttled",
            level=Level.PROBLEM,
            said=f"in {cores.throttled_share:.0%} of all periods this container was stopped",
            means="all threads stand still at once: pauses between tokens",
            change=f"a larger CPU limit, or `--threads {max(1, int(cores.quota or usable))}`",
            source="cpu.stat",
        )
    for name, value in cores.threads_asked.items():
        if value.isdigit() and int(value) > usable:
            yield Finding(
                name="threads",
                level=Level.NOTE,
                said=f"{name}={value} with {usable} usable cores",
                means="threads that wait for each other on fewer cores make every step slower",
                change=f"unset {name}, or set it to {usable}",
                source="environment",
            )


def usable_threads(cores: Cores) -> int:
    """As the engine counts: a quota of 1.5 cores is 2 threads."""
    return cores.allowed if cores.quota is None else max(1, min(cores.allowed, ceil(cores.quota)))


def _instructions(cores: Cores) -> Finding:
    flags = cores.flags
    if not flags:
        return ok("instructions", f"not known ({cores.architecture or 'this system'})")
    known = {
        "AVX2": {"avx2"},
        "AVX-512": {"avx512f"},
        "VNNI": {"avx512_vnni", "avx_vnni"},
        "BF16": {"avx512_bf16", "amx_bf16", "bf16"},
        "AMX": {"amx_tile"},
        "dot products": {"asimddp"},
    }
    there = [name for name, any_of in known.items() if flags & any_of]
    said = ", ".join(there) or "none of AVX2, AVX-512, VNNI, AMX"
    if {"VNNI", "dot products", "AMX"} & set(there):
        return ok("instructions", said)
    return Finding(
        name="instructions",
        level=Level.NOTE,
        said=said,
        means="no int8 dot products: int8 weights save memory here, and little time",
        change="a virtual CPU that passes the host's flags through, where this is a guest",
        source="/proc/cpuinfo",
    )


def _python(found: tuple[int, int, int]) -> Finding:
    said = ".".join(map(str, found))
    if found[:2] >= PYTHON_LEAST:
        return ok("python", said)
    return Finding(
        name="python",
        level=Level.PROBLEM,
        said=said,
        means="kvota needs 3.11 or newer",
        change="a newer interpreter, with its own virtual environment",
    )


def _libraries(libraries: tuple[Library, ...]) -> Finding:
    wrong = [one for one in libraries if not _is_new_enough(one)]
    if not wrong:
        shown = {"openvino", "tokenizers", "numpy"}
        versions = [f"{one.name} {one.installed}" for one in libraries if one.name in shown]
        return ok("libraries", ", ".join(versions) or f"{len(libraries)} as needed")
    said = ", ".join(
        f"{one.name} {one.installed or 'missing'}" + (f" < {one.least}" if one.installed else "")
        for one in wrong
    )
    return Finding(
        name="libraries",
        level=Level.PROBLEM,
        said=said,
        means="kvota was tested with newer ones",
        change="`pip install --upgrade kvota`",
    )


def _is_new_enough(library: Library) -> bool:
    if library.installed is None:
        return False
    return _numbers(library.installed) >= _numbers(library.least)


def _numbers(text: str) -> tuple[int, ...]:
    """Of a version, up to its first part that is no number: 2026.4.1rc2 is (2026, 4)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _port(port: int, error: str | None) -> Finding:
    if error is None:
        return ok("port", f"{port} is free")
    return Finding(
        name="port",
        level=Level.NOTE,
        said=f"{port}: {error}",
        means="a server listens there already, or this user may not",
        change=f"`--port`, or `kvota doctor --url http://127.0.0.1:{port}` to examine that server",
    )


def _clock(unix_s: float, source: str) -> Finding:
    if unix_s < BUILT_UNIX_S:
        return Finding(
            name="clock",
            level=Level.PROBLEM,
            said="it shows a day before this program was written",
            means="certificates are refused, keys expire at the wrong time",
            change="set the clock, and start a time service (chrony, systemd-timesyncd)",
        )
    if source in SLOW_CLOCKS:
        return Finding(
            name="clock",
            level=Level.NOTE,
            said=f"read from {source}",
            means="every look at the clock is a slow call to the kernel; there are several a step",
            change="clocksource=tsc (or kvm-clock, hyperv) where the hardware is sound",
            source="/sys/devices/system/clocksource",
        )
    return ok("clock", source or "set")

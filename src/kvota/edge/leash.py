"""A leash for an engine process: whoever has started it may be killed, and it still goes.

    supervisor ──pipe──▶ this file ─exec─▶ the engine, with the same process id
                   │         └─starts─▶ this file again, as the watcher, in the engine's group
                   └──────────────────▶ the watcher reads the pipe, until it ends

The pipe ends when its writer does, however that ends. The watcher then leaves the engine a moment
to go by itself (our node reads the same pipe), tells it to (SIGTERM), and at last kills the whole
group: engines that are stuck or stopped, and workers that an engine has left behind.

Why a watched pipe and not PR_SET_PDEATHSIG: that reaches the engine alone, not the workers that
hold a GPU's memory, knows one signal and no second one, and is Linux's own. Why a file that execs
and not preexec_fn: nothing runs between fork and exec in a process that has threads.

Run as a plain file, without site-packages, so that it costs some milliseconds and little memory:
`python -I -S leash.py LINGER_S KILL_AFTER_S COMMAND…`. Must be the leader of its process group.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

LINGER_S = 3.0  # to go by itself
KILL_AFTER_S = 10.0  # after it was told to go
EXIT_NOT_FOUND = 127
_EVERY_S = 0.05
_READ_BYTES = 4096
_WATCH = "--watch"
_FOR_THE_ENGINE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def leashed(
    command: Sequence[str], linger_s: float = LINGER_S, kill_after_s: float = KILL_AFTER_S
) -> tuple[str, ...]:
    """The command line that starts `command` on a leash, whose other end is standard input.

    Start it in a session of its own, with a pipe as standard input that only you can write to.
    """
    return (*_this_file(), str(linger_s), str(kill_after_s), *command)


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == _WATCH:
        watch(int(arguments[1]), float(arguments[2]), float(arguments[3]))
    else:
        become(arguments[:2], arguments[2:])


def become(times: Sequence[str], command: Sequence[str]) -> None:
    """Start the watcher, then be the engine. The signals that end are none of the watcher's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_ENGINE)  # a child has our mask
    subprocess.Popen(
        (*_this_file(), _WATCH, str(os.getpid()), *times),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"Cannot start {command[0]}: {error.strerror}.", file=sys.stderr)
        os._exit(EXIT_NOT_FOUND)


def watch(engine: int, linger_s: float, kill_after_s: float) -> None:
    """Wait until the pipe ends; then do not return before engine and group are gone."""
    while not _has_ended(sys.stdin.fileno()):
        pass
    if not _is_gone(engine, linger_s):
        os.kill(engine, signal.SIGTERM)
        _is_gone(engine, kill_after_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process too


def _has_ended(pipe: int) -> bool:
    """Wait for something to read. The engine reads the same pipe, and uvloop makes it non-blocking
    for both: a read that begins after that, or again when we are stopped and go on, must not wait.
    """
    select.select([pipe], [], [])
    try:
        return not os.read(pipe, _READ_BYTES)
    except BlockingIOError:  # the engine was faster
        return False


def _is_gone(engine: int, within_s: float) -> bool:
    """Whether our parent, the engine, ends in time. Its id cannot be another's while it is that."""
    end_s = time.monotonic() + within_s
    while os.getppid() == engine:
        if time.monotonic() >= end_s:
            return False
        time.sleep(_EVERY_S)
    return True


def _this_file() -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", __file__)


if __name__ == "__main__":
    main(sys.argv[1:])

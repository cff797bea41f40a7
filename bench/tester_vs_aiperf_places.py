"""The two servers that both testers load, and the words of one token that prompts are made of.

A server gets one half of the cores, whoever measures it the other: a tester that takes time from
the server would measure itself. With a single core there is nothing to divide.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.machine import usable_threads
from bench.server_process import UNGUESSED, ServerFailed, free_port, kvota_server
from bench.tester_vs_aiperf_figures import Told
from kvota.model.gguf_source import read_gguf_metadata
from kvota.model.gguf_tokenizer import read_gguf_tokenizer
from kvota.tools.load.prompts import PIECES, Words, one_token_words
from kvota.tools.top.samples import Samples
from tests.support.fake_backend import MODEL as FAKE_MODEL

START_MAX_S: Final = 30.0
LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A server, and words that are one token each there."""

    url: str
    model: str
    words: Words

    def page(self) -> Samples:
        """What a node's metrics page says now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            return Samples.parse(page.read().decode())

    def told(self) -> Told:
        """What the server of known timing wrote down since it was last asked."""
        with urllib.request.urlopen(f"{self.url}/told", timeout=10) as page:
            told: Told = json.load(page)
        return told


@dataclass(frozen=True, slots=True)
class Halves:
    """The cores of the server, and those of whoever measures it."""

    server: frozenset[int]
    testers: frozenset[int]

    @classmethod
    def of_this_process(cls) -> "Halves":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        middle = len(cores) // 2
        return cls(frozenset(cores[:middle] or cores), frozenset(cores[middle:]))


@contextlib.contextmanager
def staying_on(cores: frozenset[int]) -> Iterator[None]:
    """This thread, and every process it starts meanwhile. No cores: wherever the system likes."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def known_server(halves: Halves) -> Iterator[Place]:
    """The server of `bench.tester_vs_aiperf_server`, to which a word is a token."""
    words = Words([piece for piece in PIECES if piece.startswith(" ")], overhead=1)
    port = free_port()
    command = [sys.executable, "-m", "bench.tester_vs_aiperf_server", "--port", str(port)]
    with staying_on(halves.server):
        child = subprocess.Popen(command)
    try:
        place = Place(url=f"http://127.0.0.1:{port}", model=FAKE_MODEL, words=words)
        _wait_until_told(place, child)
        yield place
    finally:
        child.terminate()
        child.wait()


@contextlib.contextmanager
def node(halves: Halves, model: Path, words: Words) -> Iterator[Place]:
    """`kvota node` with `model`."""
    with contextlib.ExitStack() as closing:
        with staying_on(halves.server):
            running = kvota_server(model, usable_threads(), ["--kv-memory", "1GiB", *UNGUESSED])
            server = closing.enter_context(running)
        yield Place(url=f"http://127.0.0.1:{server.port}", model=server.model, words=words)


def write_tokenizer(model: Path, folder: Path) -> Words:
    """The tokenizer of a GGUF model in a new folder, as aiperf reads it; and its words."""
    parts = read_gguf_tokenizer(read_gguf_metadata(model))
    folder.mkdir()
    parts.core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    async def count(text: str) -> int:
        return len(parts.prefix) + len(parts.core.encode(text).ids) + len(parts.suffix)

    words = asyncio.run(one_token_words(count))
    assert words is not None, "the default model has words of one token"
    return words


def _wait_until_told(place: Place, child: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + START_MAX_S
    while child.poll() is None and time.monotonic() < end_s:
        try:
            place.told()
        except OSError:
            time.sleep(LOOK_S)
        else:
            return
    raise ServerFailed(f"the server of known timing was not ready after {START_MAX_S:.0f} s")

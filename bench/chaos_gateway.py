"""A real gateway process for a chaos run: its file, its keys, its signals, its books.

    fronting   kvota gateway                            three foreign backends
    serving    kvota serve, with a light node for an    its own node, which is killed and hung, and
               engine                                   a foreign backend to fall back to

Everything is on: keys, limits, desks, usage, metrics, journal, one version of two that rolls out.
"""

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import psutil

from bench.chaos_backends import ChaoticBackend
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, NewKey
from tests.support.fake_backend import MODEL

FRONTING: Final = (sys.executable, "-m", "kvota", "gateway", "--port", "0")
SERVING: Final = (sys.executable, "-m", "tests.support.light_serve")
START_MAX_S: Final = 60.0
STOP_MAX_S: Final = 60.0
CONCURRENCY: Final = 6  # of the key that has such a limit
_KINDS: Final = ("vllm", "openai", "sglang")
_ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    good: str
    admin: str
    few_at_once: str
    few_tokens: str
    wrong: str = "kv-000000000000-" + 64 * "0"

    @property
    def asked_with(self) -> tuple[str, ...]:
        """How often which."""
        return (*[self.good] * 12, *[self.few_at_once] * 5, *[self.few_tokens] * 2, self.wrong)


class GatewayProcess:
    """One of the two arenas. `start` it, `stop` it; everything else is for in between."""

    def __init__(self, name: str, backends: Sequence[ChaoticBackend], chance: Random) -> None:
        self.name = name
        self.backends = backends
        self.url = ""
        self.num_reloads = 0
        self.num_node_troubles = 0
        self._folder = tempfile.TemporaryDirectory(prefix="kvota-chaos-")
        self.folder = Path(self._folder.name)
        self.log = self.folder / "log"
        self.journal = self.folder / "journal"
        self._config = self.folder / "kvota.toml"
        self._chance = chance
        self._process: asyncio.subprocess.Process | None = None
        self.keys = self._new_keys()

    # --- life

    async def start(self) -> None:
        """Returns when it listens. Raises RuntimeError with what it said instead."""
        self._write_config(is_odd=False)
        command = SERVING if self.has_node else FRONTING
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder)}
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, "--config", str(self._config), stderr=log, stdout=log, env=environment
            )
        end_s = time.monotonic() + START_MAX_S
        while (address := _ADDRESS.search(self.log.read_bytes())) is None:
            if self._process.returncode is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        self.url = address[0].decode()

    async def stop(self) -> int | None:
        """Send SIGTERM and wait. The exit status; None: it had to be killed."""
        assert self._process is not None
        self._process.terminate()
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_MAX_S)
        except TimeoutError:
            self.kill()
            return None

    def kill(self) -> None:
        """End it, however it is."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def clean(self) -> None:
        self._folder.cleanup()

    @property
    def has_node(self) -> bool:
        return self.name == "serving"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def models(self) -> tuple[str, ...]:
        """How often which is asked for; one of them is nowhere."""
        if self.has_node:
            return ("own", "own", "spare")
        return (*["chat"] * 6, *["rolled"] * 3, "nothing")

    # --- troubles

    async def reload_now_and_then(self, every_s: float) -> None:
        """Another file by signal, one of three of them broken, until cancelled."""
        number = 0
        while True:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * every_s)
            number += 1
            if number % 3 == 0:
                self._config.write_text('[[models]]\nname = "chat"\nbackend = "a"\n', "utf-8")
            else:
                self._write_config(is_odd=number % 2 == 1)
            os.kill(self.pid, signal.SIGHUP)
            self.num_reloads += 1

    async def trouble_node(self, every_s: float) -> None:
        """Kill the node, or stop it in its tracks, until cancelled."""
        while True:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * every_s)
            how = signal.SIGKILL if self._chance.random() < 0.6 else signal.SIGSTOP
            for child in psutil.Process(self.pid).children():
                child.send_signal(how)
                self.num_node_troubles += 1

    def calm(self) -> None:
        """The whole file again."""
        self._write_config(is_odd=False)
        os.kill(self.pid, signal.SIGHUP)

    # --- what it says of itself

    async def page(self, session: aiohttp.ClientSession, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.keys.admin}"}
        async with session.get(self.url + path, headers=headers) as response:
            if response.content_type == "application/json":
                return await response.json()
            return await response.text()

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        """The sum of all samples whose line begins so."""
        lines = (await self.page(session, "/metrics")).splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(name))

    # --- making it

    def _new_keys(self) -> Keys:
        database = open_database(sqlite_url(self.folder / "kvota.db"), KEY_TABLES)
        store = KeyStore(database)

        def key(**fields: Any) -> str:
            return store.create(NewKey(tenant=f"t{len(store.all())}", **fields), time.time())[1]

        keys = Keys(
            good=key(),
            admin=key(is_admin=True),
            few_at_once=key(limits=KeyLimits(concurrent_requests=CONCURRENCY)),
            few_tokens=key(limits=KeyLimits(tokens_per_minute=2000)),
        )
        database.close()
        return keys

    def _write_config(self, *, is_odd: bool) -> None:
        """`is_odd`: one backend fewer, and other weights."""
        backends = list(self.backends)
        shown = backends[:-1] if is_odd and len(backends) > 1 else backends
        names = [f'"{one.name}"' for one in shown]
        lines = [
            "[gateway]",
            f'state_dir = "{self.folder}"',
            f'journal = "{self.journal}"',
            "probe_every_s = 0.5",
            "abuse_watch = false",
            "[desk]",
            "request_timeout_s = 20",
            "queue_timeout_s = 5",
        ]
        for at, one in enumerate(shown):
            lines += ["[[backends]]", f'name = "{one.name}"', f'url = "{one.url}"']
            lines += [f'kind = "{_KINDS[at % len(_KINDS)]}"', "kv_tokens = 4000"]
            lines += ["first_byte_timeout_s = 2.0", "idle_timeout_s = 2.0"]
            lines += ["max_running_requests = 8", "max_waiting_queue = 16"]
        lines += self._serving_models() if self.has_node else _fronting_models(names, is_odd)
        self._config.write_text("\n".join([*lines, ""]), "utf-8")

    def _serving_models(self) -> list[str]:
        spare = self.backends[0].name
        return [
            *("[[models]]", 'name = "own"', 'backends = ["node"]', 'served_as = "light"'),
            *('fallback = "spare"', "[[models]]", 'name = "spare"'),
            *(f'backends = ["{spare}"]', f'served_as = "{MODEL}"'),
        ]


def _fronting_models(names: Sequence[str], is_odd: bool) -> list[str]:
    new = 0.8 if is_odd else 0.3
    return [
        *("[[models]]", 'name = "chat"', f"backends = [{', '.join(names)}]"),
        *(f'served_as = "{MODEL}"', 'fallback = "rolled"', "[[models]]", 'name = "rolled"'),
        *("[[models.versions]]", 'name = "v1"', f"backends = [{names[0]}]"),
        *(f'served_as = "{MODEL}"', f"weight = {1 - new:.1f}"),
        *("[[models.versions]]", 'name = "v2"', f"backends = [{names[-1]}]"),
        *(f'served_as = "{MODEL}"', f"weight = {new:.1f}"),
    ]

import asyncio
import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.gateway.store.database import Database, StoreUnusable, open_database
from kvota.gateway.store.usage import USAGE_TABLES, UsageStore
from kvota.gateway.usage import UsageBook, UsageFilter, UsageLine

EVERYTHING = UsageFilter()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = open_database(database_url, USAGE_TABLES)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> UsageStore:
    return UsageStore(database)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "usage"


def line(tokens: int = 1, key_id: str = "kv-1", model: str = "m") -> UsageLine:
    return UsageLine(key_id=key_id, tenant="t", model=model, day=7, output_tokens=tokens)


def total(store: UsageStore) -> int:
    return sum(found.output_tokens for found in store.lines(EVERYTHING))


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.usage"))


async def test_what_was_added_is_in_the_lines_at_once(directory: Path, store: UsageStore) -> None:
    book = UsageBook(directory, store)
    for tokens in (1, 2, 3):
        book.add(line(tokens))
    assert book.num_pending == 3
    assert await book.lines(EVERYTHING) == [
        UsageLine(key_id="kv-1", tenant="t", model="m", day=7, requests=3, output_tokens=6)
    ]
    assert book.num_pending == 0
    book.add(line(4))
    assert (await book.lines(EVERYTHING))[0].output_tokens == 10
    await asyncio.to_thread(book.close)
    assert segments(directory) == []


def test_text_of_all_kinds_comes_back(directory: Path, store: UsageStore) -> None:
    book = UsageBook(directory, store)
    strange = line(key_id='a "b"\n\\', model="模型\u2028 x")
    book.add(strange)
    book.close()
    assert store.lines(EVERYTHING) == [strange]


def test_a_book_closed_without_its_database_is_counted_by_the_next(
    directory: Path, store: UsageStore
) -> None:
    failures: list[StoreUnusable] = []
    book = UsageBook(directory, BrokenStore(), on_failed=failures.append)
    book.add(line(5))
    book.close()
    assert len(failures) == 1
    UsageBook(directory, store).close()
    assert total(store) == 5


def test_while_the_database_is_away_segments_do_not_pile_up(
    directory: Path, store: UsageStore
) -> None:
    book = UsageBook(directory, BrokenStore())
    for _ in range(20):
        book.add(line())
        with pytest.raises(StoreUnusable):
            book.flush()
    assert len(segments(directory)) == 2
    book.close()
    UsageBook(directory, store).close()
    assert total(store) == 20


def test_a_live_segment_of_another_gateway_is_left_alone(
    directory: Path, store: UsageStore
) -> None:
    ours, theirs = UsageBook(directory, store), UsageBook(directory, store)
    theirs.add(line(1))
    ours.add(line(10))
    ours.flush()
    assert total(store) == 10
    theirs.add(line(100))
    theirs.flush()
    assert total(store) == 111
    ours.close()
    theirs.close()


def test_a_segment_that_another_gateway_merges_while_we_look_counts_once(
    directory: Path, store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = UsageBook(directory, store), UsageBook(directory, store)
    dead = UsageBook(directory, BrokenStore())
    dead.add(line(5))
    dead.close()
    flock, is_first = fcntl.flock, True

    def they_are_faster(file: int, operation: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            theirs.flush()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", they_are_faster)
    ours.flush()
    assert not is_first
    assert total(store) == 5
    ours.close()
    theirs.close()


@pytest.mark.parametrize("dies_in", ["merge", "forget"])
def test_dying_between_the_steps_of_a_merge_counts_nothing_twice(
    directory: Path, store: UsageStore, dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step: Callable[..., object] = getattr(store, dies_in)

    def does_it_and_dies(*arguments: object) -> None:
        step(*arguments)
        raise StoreUnusable("died")

    book = UsageBook(directory, store)
    book.add(line(5))
    with monkeypatch.context() as patched:
        patched.setattr(store, dies_in, does_it_and_dies)
        with pytest.raises(StoreUnusable, match="died"):
            book.flush()
    book.flush()
    book.close()
    assert total(store) == 5
    assert segments(directory) == []


def test_a_line_that_was_being_written_when_the_process_died_is_not_counted(
    directory: Path, store: UsageStore
) -> None:
    book = UsageBook(directory, BrokenStore())
    book.add(line(5))
    book.add(line(6))
    book.close()
    (segment,) = segments(directory)
    content = segment.read_bytes()
    for cut in range(content.index(b"\n") + 1, len(content), 9):
        segment.write_bytes(content[:cut])
        before = total(store)
        UsageBook(directory, store).close()
        assert total(store) - before == 5
        assert list(directory.iterdir()) == []


def test_damaged_lines_are_told_and_kept_aside(directory: Path, store: UsageStore) -> None:
    book = UsageBook(directory, BrokenStore())
    for tokens in (1, 20, 300):
        book.add(line(tokens))
    book.close()
    (segment,) = segments(directory)
    segment.write_bytes(segment.read_bytes().replace(b":20,", b":21,"))
    failures: list[StoreUnusable] = []
    UsageBook(directory, store, on_failed=failures.append).close()
    assert total(store) == 301
    assert [failure.message.partition(" lines")[0] for failure in failures] == ["1"]
    assert [path.suffix for path in directory.iterdir()] == [".damaged"]


def test_a_count_that_no_database_holds_is_damage(directory: Path, store: UsageStore) -> None:
    failures: list[StoreUnusable] = []
    book = UsageBook(directory, store, on_failed=failures.append)
    for tokens in (1, 2**63, 300):
        book.add(line(tokens))
    book.flush()
    book.close()
    assert total(store) == 301
    assert len(failures) == 1


def test_a_full_disk_is_told_and_leaves_no_half_line(
    directory: Path, store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, write = UsageBook(directory, store), os.write
    book.add(line(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, content: write(file, content[:9]))
        for _ in range(2):
            with pytest.raises(StoreUnusable, match="disk is full"):
                book.add(line(10))
        with pytest.raises(StoreUnusable, match="disk is full"):
            book.flush()
    book.add(line(100))
    book.close()
    assert total(store) == 121, "what the disk did not take was held, and came later"


def test_what_a_full_disk_did_not_take_is_flushed_once_it_does(
    directory: Path, store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, write = UsageBook(directory, store), os.write
    monkeypatch.setattr("kvota.gateway.usage.HELD_MAX", 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, content: write(file, content[:9]))
        for output in (1, 10, 100):
            with pytest.raises(StoreUnusable):
                book.add(line(output))
    book.flush()
    assert total(store) == 11, "no more than a bounded number is held"
    book.close()


def test_the_line_that_finds_a_full_disk_well_again_is_kept_with_the_rest(
    directory: Path, store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, write = UsageBook(directory, store), os.write
    monkeypatch.setattr("kvota.gateway.usage.HELD_MAX", 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, content: write(file, content[:9]))
        for output in (1, 10):
            with pytest.raises(StoreUnusable):
                book.add(line(output))
    book.add(line(100))
    book.close()
    assert total(store) == 111


def test_a_directory_that_cannot_be_written_is_an_error_of_configuration(
    tmp_path: Path, store: UsageStore
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Usage cannot be written"):
        UsageBook(tmp_path / "file" / "usage", store)


def test_threads_add_and_flush_at_once(directory: Path, store: UsageStore) -> None:
    book = UsageBook(directory, store)

    def add() -> None:
        for _ in range(500):
            book.add(line())

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        book.flush()
    for thread in threads:
        thread.join()
    book.close()
    assert total(store) == 2000


async def test_flushing_in_the_background_survives_failures(
    directory: Path, store: UsageStore
) -> None:
    failures: list[StoreUnusable] = []
    flaky = FlakyStore(store)
    book = UsageBook(directory, flaky, on_failed=failures.append)
    book.add(line(5))
    flushing = asyncio.create_task(book.keep_flushing(every_s=0.001))
    async with asyncio.timeout(60):
        await flaky.merged.wait()
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    await asyncio.to_thread(book.close)
    assert len(failures) >= 1
    assert total(store) == 5


def test_nothing_kept_is_lost_by_kill_9_and_nothing_counts_twice(
    tmp_path: Path, database_url: str
) -> None:
    """Real processes, killed while they add and flush, all in one directory and one database."""
    chance, directory = random.Random(9), tmp_path / "usage"
    kept = {
        f"kv-{number}": _killed_after(chance.randint(1, 400), directory, database_url, number)
        for number in range(8)
    }
    database = open_database(database_url, USAGE_TABLES)
    store = UsageStore(database)
    UsageBook(directory, store).close()
    counted = {found.key_id: found for found in store.lines(EVERYTHING)}
    assert set(counted) == set(kept)
    for key_id, at_least in kept.items():
        assert at_least <= counted[key_id].requests <= at_least + 1, key_id
        assert counted[key_id].output_tokens == 2 * counted[key_id].requests
    database.close()


def _killed_after(num_lines: int, directory: Path, url: str, number: int) -> int:
    """Run a writer until it has kept so many lines, kill it; how many it said it had kept."""
    command = [sys.executable, "-m", "tests.support.usage_writer"]
    with subprocess.Popen(
        [*command, str(directory), url, f"kv-{number}"], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        said = writer.stdout.read(8 * num_lines)
        writer.kill()
        said += writer.stdout.read()
    assert len(said) >= 8 * num_lines, "the writer ended by itself"
    return int.from_bytes(said[len(said) // 8 * 8 - 8 : len(said) // 8 * 8])


class BrokenStore(UsageStore):
    """A database that is away."""

    def __init__(self) -> None:
        pass

    def merge(self, segment: str, lines: Iterable[UsageLine]) -> bool:
        raise StoreUnusable("away")


class FlakyStore(UsageStore):
    """A database whose first merge fails."""

    def __init__(self, real: UsageStore) -> None:
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._num_merges = 0
        self.merged = asyncio.Event()

    def merge(self, segment: str, lines: Iterable[UsageLine]) -> bool:
        self._num_merges += 1
        if self._num_merges == 1:
            raise StoreUnusable("away")
        did = self._real.merge(segment, lines)
        self._loop.call_soon_threadsafe(self.merged.set)
        return did

    def forget(self, segment: str) -> None:
        self._real.forget(segment)


async def test_a_process_with_no_file_left_goes_on_and_flushes_later(
    directory: Path, store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chore died of it, and the whole gateway with the chore."""
    failures: list[StoreUnusable] = []
    book = UsageBook(directory, store, on_failed=failures.append)
    book.add(line(5))

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr("kvota.gateway.usage.os.open", no_more)
        flushing = asyncio.create_task(book.keep_flushing(every_s=0.001))
        async with asyncio.timeout(60):
            while len(failures) < 2:  # noqa: ASYNC110 - another thread does it
                await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        while book.num_pending:  # noqa: ASYNC110 - another thread does it
            await asyncio.sleep(0.001)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    await asyncio.to_thread(book.close)
    assert total(store) == 5
    assert "Too many open files" in failures[0].message

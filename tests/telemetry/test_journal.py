"""The journal survives kills, full disks and its own size, and gives no text away."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvota.telemetry.journal import (
    PREFIX_BYTES,
    JournalError,
    JournalLine,
    JournalWriter,
    PrefixNumbers,
    new_prefix_numbers,
    read_journal,
)


def line(number: int = 0, **fields: object) -> JournalLine:
    values: dict[str, object] = {
        "v": 1, "at": 1000.5 + number, "id": f"r{number}", "model": "m", "outcome": "completed",
        "prompt_tokens": 10 + number, "output_tokens": 5, "total_s": 0.25,
    }  # fmt: skip
    return JournalLine(**(values | fields))  # type: ignore[arg-type]


def lines_of(path: Path) -> list[JournalLine]:
    with path.open("rb") as file:
        return list(read_journal(file))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    written = [line(0), line(1, prefix=(3, 4), n=2, first_token_s=0.125, texts=("a\nb", "c"))]
    for one in written:
        writer.write(one)
    writer.close()
    assert lines_of(path) == written


def test_a_second_writer_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(3):
        writer = JournalWriter(path)
        writer.write(line(number))
        writer.close()
    assert [one.id for one in lines_of(path)] == ["r0", "r1", "r2"]


def test_the_file_is_only_for_its_owner(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "j").close()
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0


def test_files_turn_over_at_their_size_and_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    size = 1 + len(msgspec.json.encode(line(10)))
    writer = JournalWriter(path, bytes_max=3 * size, keep=2)
    for number in range(10, 21):  # 11 lines, three to a file
        writer.write(line(number))
    writer.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["j", "j.1", "j.2"]
    kept = [one.id for name in ("j.2", "j.1", "j") for one in lines_of(tmp_path / name)]
    assert kept == [f"r{number}" for number in range(13, 21)]
    assert writer.num_lost == 0


def test_a_file_that_was_moved_or_removed_is_made_anew(tmp_path: Path) -> None:
    """As logrotate does, which tells nobody."""
    path = tmp_path / "j"
    writer = JournalWriter(path)
    writer.write(line(0))
    path.rename(tmp_path / "old")
    writer.write(line(1))
    writer.write(line(2))
    path.unlink()
    writer.write(line(3))
    path.rename(tmp_path / "other")
    path.touch()  # whoever moves it may make the next one
    writer.write(line(4))
    writer.close()
    assert [one.id for one in lines_of(tmp_path / "old")] == ["r0"]
    assert [one.id for one in lines_of(tmp_path / "other")] == ["r3"]
    assert [one.id for one in lines_of(path)] == ["r4"]
    assert writer.num_lost == 0


def test_lines_are_counted_while_there_is_nowhere_to_write_them(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    writer = JournalWriter(folder / "j")
    folder.rename(tmp_path / "away")
    writer.write(line(0))
    folder.mkdir()
    writer.write(line(1))
    writer.close()
    assert [one.id for one in lines_of(folder / "j")] == ["r1"]
    assert writer.num_lost == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    writer = JournalWriter(Path("/dev/full"))
    writer.write(line())
    writer.write(line())
    assert writer.num_lost == 2
    writer.close()


WRITES_UNTIL_KILLED = """
import sys
from itertools import count
from pathlib import Path
from kvota.telemetry.journal import JournalLine, JournalWriter
writer = JournalWriter(Path(sys.argv[1]))
for number in count():
    writer.write(JournalLine(v=1, at=0.0, id=str(number), model="m", outcome="completed",
                             prompt_tokens=1, output_tokens=1, total_s=0.0))
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for said in child.stdout:
            if int(said) >= 200:
                child.send_signal(signal.SIGKILL)
                break
        last = [int(said), *(int(rest) for rest in child.stdout)][-1]
    ids = [int(one.id) for one in lines_of(path)]
    assert ids == list(range(len(ids)))
    assert len(ids) > last


def test_a_torn_last_line_is_passed_over_and_a_torn_middle_is_told() -> None:
    whole = msgspec.json.encode(line())
    assert list(read_journal([whole, whole[:20]])) == [line()]
    with pytest.raises(JournalError, match="line 2"):
        list(read_journal([whole, whole[:20], whole]))


def test_another_version_is_refused_by_number() -> None:
    with pytest.raises(JournalError, match="version 7; this reads 1"):
        list(read_journal([msgspec.json.encode(line(v=7))]))


def test_prefix_numbers_agree_as_far_as_the_texts_do() -> None:
    numbers = new_prefix_numbers()
    shared = "x" * (2 * PREFIX_BYTES)
    one = numbers.of([shared, "a" * PREFIX_BYTES])
    other = numbers.of([shared, "b" * PREFIX_BYTES])
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert len(one) == len(other) == 3
    assert numbers.of(["short"]) == ()
    assert all(0 <= number < 2**53 for number in one)


def test_where_one_text_ends_matters() -> None:
    numbers = PrefixNumbers(bytes(32))
    half = "y" * PREFIX_BYTES
    assert numbers.of([half, half]) != numbers.of([half + half])


def test_numbers_of_two_writers_have_nothing_in_common() -> None:
    text = ["z" * PREFIX_BYTES]
    assert new_prefix_numbers().of(text) != new_prefix_numbers().of(text)

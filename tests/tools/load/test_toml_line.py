"""One value changes, every other byte stays."""

import tomllib
from pathlib import Path

import pytest

from kvota.tools.load.toml_line import CannotEdit, edit, with_values

FILE = """\
# our server
[model]
model = "tiny"   # small

[engine]
max_running_requests = 64  # measured in March
kv_budget_ratio = 0.85

[desk]
risk = 2.0

[[backends]]
name = "a"
"""
CHANGES = {("engine", "max_running_requests"): 7, ("desk", "max_waiting_queue"): 12}


def test_a_value_is_replaced_and_a_missing_one_added_in_its_section() -> None:
    changed = with_values(FILE, CHANGES)
    expected = FILE.replace("= 64  #", "= 7  #").replace(
        "risk = 2.0\n", "risk = 2.0\nmax_waiting_queue = 12\n"
    )
    assert changed == expected


def test_changing_twice_changes_nothing_more() -> None:
    once = with_values(FILE, CHANGES)
    assert with_values(once, CHANGES) == once


def test_a_missing_section_is_added_at_the_end() -> None:
    assert with_values("# mine\n", CHANGES) == (
        "# mine\n\n[engine]\nmax_running_requests = 7\n\n[desk]\nmax_waiting_queue = 12\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[engine]",
        "[engine]\nmax_running_requests=1",
        "[engine] # x\r\nmax_running_requests = 1 # y\r\n[desk]\r\n",
        "[ desk ]\n\n\n[engine]\n",
        '[model]\nmodel = "[desk]"\n',
    ],
)
def test_whatever_it_was_it_reads_back_as_meant(text: str) -> None:
    content = tomllib.loads(with_values(text, CHANGES))
    assert content["engine"]["max_running_requests"] == 7
    assert content["desk"]["max_waiting_queue"] == 12


@pytest.mark.parametrize(
    "text",
    [
        "engine = {max_running_requests = 64}\n",
        "engine.max_running_requests = 64\n",
        'x = """\n[engine]\n"""\n',
        "[engine\n",
    ],
)
def test_what_cannot_be_changed_by_a_line_is_refused(text: str) -> None:
    with pytest.raises(CannotEdit):
        with_values(text, CHANGES)


def test_a_file_keeps_its_line_ends_and_is_made_when_missing(tmp_path: Path) -> None:
    path = tmp_path / "kvota.toml"
    edit(path, CHANGES)
    assert tomllib.loads(path.read_text())["desk"] == {"max_waiting_queue": 12}
    path.write_bytes(b"[engine]\r\nmax_running_requests = 5\r\n")
    edit(path, {("engine", "max_running_requests"): 6})
    assert path.read_bytes() == b"[engine]\r\nmax_running_requests = 6\r\n"


def test_a_file_that_was_refused_is_untouched(tmp_path: Path) -> None:
    path = tmp_path / "kvota.toml"
    path.write_text("engine = {max_running_requests = 64}\n")
    with pytest.raises(CannotEdit, match=r"kvota\.toml"):
        edit(path, CHANGES)
    assert path.read_text() == "engine = {max_running_requests = 64}\n"

"""No diagnosis of a running server without a test that makes one ill of it, live."""

import re
from pathlib import Path

import kvota.tools.doctor
from kvota.tools.doctor import diagnosis

SOURCES = Path(kvota.tools.doctor.__path__[0])
LIVE = ("test_illnesses.py", "test_gateway_illnesses.py")
NAME = re.compile(r"\bname=(?:f?\"([^\"]+)\"|\w+)")


def names_in(module: str) -> set[str]:
    """What findings of a module are called, up to what differs from case to case."""
    text = (SOURCES / f"{module}.py").read_text()
    return {found.partition("{")[0] for found in NAME.findall(text) if found}


def test_every_diagnosis_has_a_test_that_creates_the_illness_live() -> None:
    modules = {cause.__module__.rpartition(".")[2] for cause in diagnosis.CAUSES}
    names = set().union(*map(names_in, modules))
    assert {"engine stuck", "retry storm from key ", "KV only rises: leak"} <= names
    tests = "".join((Path(__file__).parent / name).read_text() for name in LIVE)
    assert {name for name in names if f'"{name}' not in tests and f'f"{name}' not in tests} == set()

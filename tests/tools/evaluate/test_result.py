import json
from pathlib import Path
from typing import Any

import pytest

from kvota.tools.evaluate.gate import Verdict
from kvota.tools.evaluate.result import NotProven, Served, place_of, require_good

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
NEW, OLD = Served("v2", "m-int8"), Served("v1", "m")


def written(folder: Path, **changes: Any) -> Path:
    side = {"url": "http://127.0.0.1:1", "model": "m", "dialect": "echo", "top": 5}
    result = {
        "format": "kvota-evaluation/1",
        "verdict": "good",
        "reason": "Because.",
        "written_at_s": NOW_S - DAY_S,
        "baseline": side,
        "candidate": {**side, "model": "m-int8"},
        "texts": [],
        **changes,
    }
    path = folder / "evaluate.json"
    path.write_text(json.dumps(result))
    return path


def test_a_good_and_recent_result_of_the_version_is_enough(tmp_path: Path) -> None:
    result = require_good(written(tmp_path), candidate=NEW, now_s=NOW_S)
    assert result.verdict is Verdict.GOOD
    assert require_good(written(tmp_path), now_s=NOW_S).candidate.model == "m-int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "worse"}, "does not say that m-int8 is good. Because."),
        ({"verdict": "undecided"}, "does not say that m-int8 is good"),
        ({"written_at_s": NOW_S - 8 * DAY_S}, "8.0 days old; at most 7"),
        ({"written_at_s": NOW_S + DAY_S}, "-1.0 days old"),
        ({"format": "kvota-evaluation/9"}, "has format kvota-evaluation/9"),
        ({"verdict": "fine"}, "is no result"),
        ({"candidate": {"model": "x", "url": ""}}, "is x, not m-int8"),
    ],
)
def test_anything_else_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotProven, match=message):
        require_good(written(tmp_path, **changes), candidate=NEW, now_s=NOW_S)


def test_a_result_of_another_pair_proves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert require_good(path, candidate=NEW, baseline=OLD, now_s=NOW_S)
    with pytest.raises(NotProven, match=r"baseline of .* is m, not m-old"):
        require_good(path, candidate=NEW, baseline=Served("v1", "m-old"), now_s=NOW_S)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1/", "http://[::1]:1/v1"])
def test_a_result_is_of_one_place_however_it_is_spelt(tmp_path: Path, url: str) -> None:
    here = Served("v2", "m-int8", ["https://gpu/x", url])
    assert require_good(written(tmp_path), candidate=here, now_s=NOW_S)
    there = Served("v2", "m-int8", ["http://127.0.0.1:2"])
    with pytest.raises(NotProven, match=r"is served at http://127\.0\.0\.1:2\. Evaluate it there"):
        require_good(written(tmp_path), candidate=there, now_s=NOW_S)


def test_a_port_that_goes_without_saying_is_the_same() -> None:
    assert place_of("https://GPU.example./v1/") == place_of("https://gpu.example:443")
    assert place_of("https://gpu.example") != place_of("http://gpu.example")


def test_a_missing_file_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="No such file"):
        require_good(tmp_path / "none.json", now_s=NOW_S)

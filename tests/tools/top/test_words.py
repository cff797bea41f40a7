import pytest

from kvota.desk.ticket import EtaBasis
from kvota.tools.top import words
from kvota.tools.top.scene import Watch
from kvota.wire.requests import LATEST
from tests.support.watched_server import live, queued, reading


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (None, "–", "–"),
        (0.4, "0 s", "0s"),
        (59.4, "59 s", "59s"),
        (59.6, "1 m 00 s", "1m00"),
        (192, "3 m 12 s", "3m12"),
        (5 * 3600 + 125, "5 h 02 m", "5h02"),
        (2 * 86400 + 3 * 3600, "2 d 03 h", "2d03"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, long: str, short: str) -> None:
    assert words.duration(seconds) == long
    assert words.short_duration(seconds) == short


def test_a_row_has_a_cell_for_every_column() -> None:
    request = live(
        "a", client_id="run-7:step-12", phase="prefill", computed_tokens=512, prompt_tokens=2900,
        num_choices=2, age_s=75.0, tokens_per_s=None, output_tokens=0,
    )  # fmt: skip
    cells = words.row(request)
    assert len(cells) == len(words.COLUMNS) == len(words.SIDES)
    assert [cell.strip() for cell in cells] == [
        "run-7:step…", "short", "inter", "prefill", "512/2900", "0/128", "–", "3", "1m15", "",
    ]  # fmt: skip


def test_a_prompt_that_is_read_is_read_whole_however_much_was_computed_after_it() -> None:
    assert words.row(live("a", prompt_tokens=40, computed_tokens=55))[4] == " 40/40"


def test_the_line_fits_its_room_and_tells_how_many_more_there_are() -> None:
    waiting = [queued(str(number), number, client_id="x" * 20) for number in range(1, 13)]
    scene = Watch().see(reading(*waiting), 0.0, 0.0)
    lines = words.line(scene, 28, 4)
    assert lines == [
        "1     2s xxxxxxx… KV memory",
        "2     4s xxxxxxx… KV memory",
        "3     6s xxxxxxx… KV memory",
        "… and 9 more",
    ]
    assert len(words.line(scene, 28, 12)) == 12
    assert max(map(len, words.line(scene, 10, 5))) <= 12
    assert words.line(scene, 28, 0) == []


def test_an_eta_that_nobody_knows_is_a_question_mark() -> None:
    scene = Watch().see(reading(queued("a", 1, eta_s=None, why=None)), 0.0, 0.0)
    assert words.line(scene, 40, 3) == ["1      ? client-a"]


def test_an_eta_that_is_the_latest_moment_says_so() -> None:
    told = queued("a", 1, eta_s=12.0, eta_basis="max_tokens")
    assert words.line(Watch().see(reading(told), 0.0, 0.0), 40, 3) == [
        "1   ≤12s client-a KV memory"
    ]


def test_every_basis_of_a_latest_moment_is_known_by_name() -> None:
    assert {basis.value for basis in EtaBasis if basis.is_bound} == LATEST


def test_refusals_are_told_by_reason() -> None:
    scene = Watch().see(reading(refused={"queue_full": 12, "draining": 3}), 0.0, 0.0)
    assert words.refusals(scene) == "refused 15: queue_full 12, draining 3"
    assert words.refusals(Watch().see(reading(), 0.0, 0.0)) == "refused 0"


def test_memory_is_told_in_blocks_even_before_there_are_any() -> None:
    scene = Watch().see(reading(used=6, cached=2, free=4), 0.0, 0.0)
    assert words.memory(scene) == "used 6 (50%) · cached 2 · free 4"
    assert words.memory(Watch().see(reading(), 0.0, 0.0)) == "used 0 (0%) · cached 0 · free 0"


def test_a_sparkline_keeps_the_latest_and_stands_on_zero() -> None:
    assert words.sparkline([0, 7, 3.5], 3) == "▁█▅"
    assert words.sparkline([9, 0, 1], 2) == "▁█"
    assert words.sparkline([1], 4) == "   █"
    assert words.sparkline([0, 0], 2) == "▁▁"
    assert words.sparkline([1, 2], 0) == ""

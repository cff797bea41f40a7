"""Traces that are not shipped, by small files in their formats."""

from pathlib import Path

import pytest

from kvota.traffic.arrival import prompt_of
from kvota.traffic.opening import TraceFormat, format_of, open_traffic
from kvota.traffic.shape import shape_of
from kvota.traffic.traces import TraceError
from tests.support.small_traces import BURSTGPT, write_bailian, write_burstgpt


@pytest.mark.parametrize("layout", BURSTGPT)
def test_burstgpt_is_known_by_its_columns(layout: str, tmp_path: Path) -> None:
    assert format_of(write_burstgpt(tmp_path, layout)) is TraceFormat.BURSTGPT


def test_burstgpt_of_six_columns(tmp_path: Path) -> None:
    """Times are seconds from the first; what failed there, with no answer, is passed over."""
    traffic = open_traffic(write_burstgpt(tmp_path, "6 columns"))
    arrivals = list(traffic.arrivals)
    assert [one.at_s for one in arrivals] == [0.0, 40.0, 50.0]
    assert [(one.prompt_tokens, one.output_tokens) for one in arrivals] == [
        (472, 18), (1087, 230), (96, 4),
    ]  # fmt: skip
    assert {one.session for one in arrivals} == {None}
    assert traffic.passed_over.num == 1
    assert traffic.has_times


def test_burstgpt_of_eight_columns_has_sessions(tmp_path: Path) -> None:
    arrivals = list(open_traffic(write_burstgpt(tmp_path, "8 columns")).arrivals)
    assert [one.at_s for one in arrivals] == [0.0, 51.5, 82.0]
    assert [one.session for one in arrivals] == ["0b1f-a", None, "0b1f-a"]


def test_bailian_turns_are_sessions_and_share_blocks_of_16_tokens(tmp_path: Path) -> None:
    path = write_bailian(tmp_path)
    assert format_of(path) is TraceFormat.BAILIAN
    first, stranger, second = open_traffic(path).arrivals
    assert [one.at_s for one in (first, stranger, second)] == [61.114, 61.5, 75.25]
    assert [one.session for one in (first, stranger, second)] == ["7", "9", "7"]
    assert first.prefix_block == 16
    assert len(first.prefix) == -(-first.prompt_tokens // 16)
    before, after, other = (prompt_of(one, 0) for one in (first, second, stranger))
    assert (len(before), len(after)) == (521, 700)
    assert after[:512] == before[:512]
    assert after[512:528] != before[512:528]
    assert other[:16] != before[:16]


def test_what_bailian_could_save_is_counted(tmp_path: Path) -> None:
    reuse = shape_of(open_traffic(write_bailian(tmp_path)).arrivals).reuse
    assert reuse is not None
    assert (reuse.block_tokens, reuse.num_blocks, reuse.num_hits) == (16, 33 + 3 + 44, 32)
    assert reuse.num_distinct == 33 + 3 + 12
    assert reuse.token_share == pytest.approx(512 / (521 + 40 + 700))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("b.csv", "Timestamp,Request tokens,Response tokens\n1,two,3\n", "b.csv:2: not a row of"),
        ("b.jsonl", '{"chat_id":1,"parent_chat_id":-1,"timestamp":1,"hash_ids":[]}\n', "b.jsonl:1"),
    ],
)
def test_a_broken_row_is_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        list(open_traffic(path).arrivals)

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.request import Band
from kvota.traffic.arrival import Arrival
from kvota.traffic.opening import open_traffic
from kvota.traffic.shape import shape_of
from kvota.traffic.writing import Target, write_traffic

TRACES = Path("bench/traces")


def through(arrivals: list[Arrival], target: Target, folder: Path) -> list[Arrival]:
    """What a reader makes of what was written."""
    path = folder / "converted"
    with path.open("wb") as file:
        assert write_traffic(arrivals, target, file) == len(arrivals)
    return list(open_traffic(path, spreads=False).arrivals)


def mooncake_head() -> list[Arrival]:
    path = TRACES / "mooncake_conversation_head.jsonl.gz"
    return list(open_traffic(path, spreads=False).arrivals)


@pytest.mark.parametrize("target", list(Target))
def test_times_and_lengths_survive_in_every_format(target: Target, tmp_path: Path) -> None:
    before = mooncake_head()
    after = through(before, target, tmp_path)
    assert [(one.prompt_tokens, one.output_tokens) for one in after] == [
        (one.prompt_tokens, one.output_tokens) for one in before
    ]
    assert [one.at_s for one in after] == pytest.approx([one.at_s for one in before], abs=2e-6)


def test_mooncake_through_mooncake_is_the_same_file(tmp_path: Path) -> None:
    before = mooncake_head()
    assert through(before, Target.MOONCAKE, tmp_path) == before


def test_a_journal_keeps_what_prompts_share(tmp_path: Path) -> None:
    before, after = mooncake_head(), through(mooncake_head(), Target.JOURNAL, tmp_path)
    for one, other in zip(before, after, strict=True):
        assert len(other.prefix) == one.prompt_tokens // 256
    first_two = [shape_of(one).reuse for one in (before, after)]
    assert all(first_two)
    shares = [reuse.token_share for reuse in first_two if reuse]
    assert shares[1] == pytest.approx(shares[0], rel=0.01)


def test_small_blocks_become_large_ones_without_sharing_more(tmp_path: Path) -> None:
    small = [
        Arrival(at_s=float(at), prompt_tokens=len(ids) * 16, output_tokens=1, max_tokens=1,
                prefix=tuple(ids), prefix_block=16)
        for at, ids in enumerate((range(64), range(64), [*range(40), *range(900, 924)]))
    ]  # fmt: skip
    one, same, half = through(small, Target.MOONCAKE, tmp_path)
    assert one.prefix == same.prefix
    assert half.prefix[0] == one.prefix[0]
    assert half.prefix[1] != one.prefix[1]


def test_prompts_of_which_nothing_is_known_share_nothing(tmp_path: Path) -> None:
    plain = [replace(one, prefix=()) for one in mooncake_head()[:20]]
    reuse = shape_of(through(plain, Target.MOONCAKE, tmp_path)).reuse
    assert reuse is not None
    assert reuse.num_hits == 0
    assert reuse.num_blocks == sum(-(-one.prompt_tokens // 512) for one in plain)


arrivals = st.builds(
    Arrival,
    at_s=st.floats(0, 1e6).map(lambda at: round(at, 6)),
    prompt_tokens=st.integers(1, 10**6),
    output_tokens=st.integers(1, 1000),
    max_tokens=st.integers(1000, 2000),
    n=st.integers(1, 4),
    tenant=st.text(min_size=1, max_size=5),
    band=st.sampled_from(Band),
)


@given(st.lists(arrivals, max_size=5))
def test_a_journal_keeps_all_that_decides_a_request(written: list[Arrival]) -> None:
    file = io.BytesIO()
    write_traffic(written, Target.JOURNAL, file)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [row.get("tenant", "default") for row in rows] == [one.tenant for one in written]
    assert [row.get("n", 1) for row in rows] == [one.n for one in written]
    assert [row["max_tokens"] for row in rows] == [one.max_tokens for one in written]
    assert [row["at"] for row in rows] == [one.at_s for one in written]

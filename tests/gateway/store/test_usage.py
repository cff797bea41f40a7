from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.store.database import open_database
from kvota.gateway.store.usage import (
    USAGE_TABLES,
    UsageFilter,
    UsageLine,
    UsageStore,
    day_of,
    iso_day,
    summed,
)

EVERYTHING = UsageFilter()


@pytest.fixture
def store(database_url: str) -> Iterator[UsageStore]:
    database = open_database(database_url, USAGE_TABLES)
    yield UsageStore(database)
    database.close()


def line(
    key_id: str = "kv-1", model: str = "m", day: int = 100, tenant: str = "t", tokens: int = 10
) -> UsageLine:
    return UsageLine(
        key_id=key_id,
        tenant=tenant,
        model=model,
        day=day,
        prompt_tokens=tokens,
        cached_tokens=tokens // 2,
        output_tokens=3,
        refusals=1,
        kv_block_seconds=0.25,
    )


def test_lines_of_a_key_a_model_and_a_day_become_one_sum(store: UsageStore) -> None:
    assert store.merge("one", [line(), line(tokens=20), line(model="other")])
    assert store.merge("two", [line(tokens=2**40)])
    assert store.lines(EVERYTHING) == [
        UsageLine(
            key_id="kv-1",
            tenant="t",
            model="m",
            day=100,
            requests=3,
            prompt_tokens=30 + 2**40,
            cached_tokens=15 + 2**39,
            output_tokens=9,
            refusals=3,
            kv_block_seconds=0.75,
        ),
        line(model="other"),
    ]


def test_a_segment_counts_once_however_often_it_is_merged(store: UsageStore) -> None:
    assert store.merge("one", [line()])
    assert not store.merge("one", [line()])
    assert store.lines(EVERYTHING) == [line()]
    store.forget("one")
    store.forget("one")
    assert store.lines(EVERYTHING) == [line()]


def test_a_segment_may_be_empty(store: UsageStore) -> None:
    assert store.merge("one", [])
    assert store.lines(EVERYTHING) == []


def test_lines_are_chosen_by_every_field(store: UsageStore) -> None:
    everything = [
        line(key_id=f"kv-{key}", model=model, day=day, tenant=f"tenant-{key}")
        for day in (100, 101, 102)
        for key in (1, 2)
        for model in ("a", "b")
    ]
    store.merge("one", reversed(everything))
    assert store.lines(EVERYTHING) == everything
    chosen = {
        UsageFilter(first_day=101): [found for found in everything if found.day >= 101],
        UsageFilter(last_day=101): [found for found in everything if found.day <= 101],
        UsageFilter(first_day=101, last_day=101): [f for f in everything if f.day == 101],
        UsageFilter(key_id="kv-2"): [found for found in everything if found.key_id == "kv-2"],
        UsageFilter(tenant="tenant-1"): [f for f in everything if f.tenant == "tenant-1"],
        UsageFilter(model="b", first_day=102): everything[-3::2],
    }
    for wanted, lines in chosen.items():
        assert store.lines(wanted) == lines


def test_segments_merged_at_once_lose_nothing_and_do_not_wait_crosswise(
    database_url: str,
) -> None:
    opened = [open_database(database_url, USAGE_TABLES) for _ in range(4)]
    lines = [line(key_id=f"kv-{key}", model=model) for key in range(5) for model in "abc"]

    def merge(number: int) -> None:
        mixed = lines if number % 2 else lines[::-1]
        UsageStore(opened[number % 4]).merge(f"segment {number}", mixed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(merge, range(24)))
    assert {found.requests for found in UsageStore(opened[0]).lines(EVERYTHING)} == {24}
    for database in opened:
        database.close()


@given(st.lists(st.builds(line, key_id=st.sampled_from("ab"), tokens=st.integers(0, 99))))
def test_summing_keeps_every_total(lines: list[UsageLine]) -> None:
    sums = summed(lines, lambda found: found.key_id)
    assert len(sums) == len({found.key_id for found in lines})
    for name in ("requests", "prompt_tokens", "cached_tokens", "refusals", "kv_block_seconds"):
        assert sum(getattr(found, name) for found in sums) == pytest.approx(
            sum(getattr(found, name) for found in lines)
        )


def test_days_begin_at_midnight_utc() -> None:
    assert [day_of(at) for at in (0, 86_399.9, 86_400, 1_796_000_000)] == [0, 0, 1, 20787]
    assert iso_day(day_of(1_796_000_000)) == "2026-11-30"

"""Pages are compared with those of prometheus_client fed the same."""

import prometheus_client as oracle
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvota.telemetry.metrics import PlainRegistry
from kvota.telemetry.series import Counter, Histogram

BUCKETS = (0.005, 0.5, 1, 2.5, 300)
values = st.one_of(st.sampled_from([0.0, *BUCKETS, 301.0]), st.floats(0, 1000))
rows = st.tuples(st.sampled_from(["a", 'quoted "b"']), st.sampled_from(["x", "y"]))


@given(st.lists(st.tuples(rows, values)))
def test_pages_are_those_of_prometheus_client(fed: list[tuple[tuple[str, str], float]]) -> None:
    ours, theirs = PlainRegistry(), PlainRegistry()
    labels = ("model", "outcome")
    counter = Counter("requests", "Ended requests.", labels, registry=ours)
    spread = Histogram("wait_seconds", "Waits.", labels, buckets=BUCKETS, registry=ours)
    their_counter = oracle.Counter("requests", "Ended requests.", labels, registry=theirs)
    their_spread = oracle.Histogram(
        "wait_seconds", "Waits.", labels, buckets=BUCKETS, registry=theirs
    )
    for row, value in fed:
        counter.labels(*row).inc(value)
        their_counter.labels(*row).inc(value)
        spread.labels(*row).observe(value)
        their_spread.labels(*row).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_without_labels_there_is_one_row_before_anything_is_counted() -> None:
    ours, theirs = CollectorRegistry(), PlainRegistry()
    Counter("reloads", "Reloads.", registry=ours)
    Histogram("wait_seconds", "Waits.", buckets=BUCKETS, registry=ours)
    oracle.Counter("reloads", "Reloads.", registry=theirs)
    oracle.Histogram("wait_seconds", "Waits.", buckets=BUCKETS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)

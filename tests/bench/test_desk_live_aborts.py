"""Aborts come at every kind of moment; the verdict is of what both sides say."""

from random import Random

import pytest

from bench.client import Answer, Asked
from bench.desk_live_aborts import Aftermath, Attempt, Tally, attempt, findings
from bench.desk_live_metrics import parsed

CLEAN = """
kvota_kv_blocks{state="used"} 0
kvota_kv_blocks_held_after_abort 0
kvota_requests_running{lane="short"} 0
kvota_requests_waiting{lane="short",band="batch"} 0
kvota_requests_total{model="m",outcome="client_closed"} 2
kvota_requests_total{model="m",outcome="completed"} 1
"""


def attempts(number: int = 1_000) -> list[Attempt]:
    chance = Random(1)
    return [attempt(chance, one) for one in range(number)]


def asked(answer: Answer, *, is_left: bool = False) -> Asked:
    one = Asked.__new__(Asked)
    one.answer, one.is_left = answer, is_left
    return one


def test_every_way_meets_every_kind_of_request() -> None:
    kinds = {(one.way, one.is_stream, one.is_batch, one.ask.is_long) for one in attempts()}
    assert len(kinds) == 3 * 2 * 2 * 2
    assert len({one.name for one in attempts()}) == 1_000


def test_moments_are_as_often_short_as_long() -> None:
    delays_s = [one.delay_s for one in attempts() if one.num_events is None]
    assert min(delays_s) >= 0.001
    assert max(delays_s) <= 4.0
    assert 0.4 < sum(delay_s < 0.0632 for delay_s in delays_s) / len(delays_s) < 0.6
    assert all(one.is_stream for one in attempts() if one.num_events is not None)


def test_a_request_counts_as_aborted_only_if_it_had_not_ended() -> None:
    tally, one = Tally(), attempts(1)[0]
    tally.see(one, asked(Answer(0.0), is_left=True), "queued")
    tally.see(one, asked(Answer(0.0, status=410, code="request_cancelled")), "decode")
    tally.see(one, asked(Answer(0.0, status=503, code="queue_full")), "not seen")
    tally.see(one, asked(Answer(0.0, status=200, is_whole=True)), "decode")
    tally.see(one, asked(Answer(0.0)), "decode")
    assert tally.aborted.total() == 2
    assert tally.phases == {"queued": 1, "decode": 1}
    assert tally.ended == {"queue_full": 1, "whole": 1, "no answer": 1}


@pytest.mark.parametrize(
    ("change", "num_missed"),
    [
        (("", ""), 0),
        (('state="used"} 0', 'state="used"} 3'), 1),
        (("after_abort 0", "after_abort 1"), 1),
        (('running{lane="short"} 0', 'running{lane="short"} 1'), 1),
        (('outcome="client_closed"} 2', 'outcome="client_closed"} 3'), 1),  # a double ending
        (('outcome="client_closed"} 2', 'outcome="engine_error"} 2'), 1),
    ],
)
def test_each_thing_left_behind_is_a_missed_target(
    change: tuple[str, str], num_missed: int
) -> None:
    page = parsed(CLEAN.replace(*change) if change[0] else CLEAN)
    tally = Tally(num_sent=2)
    found = list(findings(tally, Aftermath(page, num_more=1, settled_s=0.1, is_whole=True)))
    assert sum(not one.is_met for one in found) == num_missed


def test_a_server_error_or_a_dropped_connection_is_a_missed_target() -> None:
    tally = Tally(num_sent=2)
    tally.statuses.update({200: 1, 503: 5, 504: 1, 500: 1})
    tally.ended["no answer"] = 1
    after = Aftermath(parsed(CLEAN), num_more=1, settled_s=0.1, is_whole=False)
    assert [one.is_met for one in findings(tally, after)] == [True, True, True, False, False, False]

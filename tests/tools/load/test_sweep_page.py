"""What a row of a sweep's table says beside its figures."""

from dataclasses import replace

from kvota.tools.load.asked import Seen
from kvota.tools.load.lag import Lag
from kvota.tools.load.measure import Slo, measure
from kvota.tools.load.sweep_page import trial_cells

STEADY = measure(
    [Seen(scheduled_s=at / 10, sent_s=0.0, ended_s=0.2, first_token_s=0.1) for at in range(100)],
    10.0,
    (0.0, 10.0),
    Slo(ttft_s=1.0, tpot_s=1.0),
    Lag(),
)


def test_a_rate_at_which_open_requests_pile_up_says_so() -> None:
    assert trial_cells(STEADY)[0] == "10"
    assert trial_cells(STEADY, "(plan)")[0] == "10 (plan)"
    assert trial_cells(replace(STEADY, in_flight_growth=100), "(plan)")[0] == "10 (piles up)"

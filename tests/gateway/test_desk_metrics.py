"""What a desk here counts of the places that were left: known times and tokens, and their sums."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvota.core.clock import ManualClock
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Ticket
from kvota.gateway.desk_metrics import DeskMetrics
from kvota.gateway.upstream.foreign_desk import ForeignDesk
from kvota.gateway.upstream.passage import Tally

SETTINGS = DeskSettings(admission=Admission.RESERVE)


def samples(metrics: DeskMetrics) -> dict[str, float]:
    """Of the backend `gpu`."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = [sample for family in families for sample in family.samples]
    assert {one.labels["backend"] for one in found} <= {"gpu"}
    return {one.name: one.value for one in found if "le" not in one.labels}


async def left(*tallies: Tally | None, n: int = 1) -> dict[str, float]:
    """The page after places that arrived at 10 s, were granted at once and left at 18 s."""
    metrics = DeskMetrics()
    for number, tally in enumerate(tallies):
        clock = ManualClock(10.0)
        desk = ForeignDesk(clock, SETTINGS, capacity_tokens=500, observer=metrics.of("gpu"))
        ticket = Ticket(
            id=str(number), tenant="t", model="m", prompt_tokens=7, max_tokens=20, n=n,
            arrived_s=10.0,
        )  # fmt: skip
        async with desk.admitted(ticket) as place:
            place.tally = tally
            clock.advance(8.0)
    return samples(metrics)


def tally(output: int, *, last_s: float = 15.0, cached: int = 0) -> Tally:
    return Tally(
        prompt_tokens=7, cached_tokens=cached, output_tokens=output, first_token_s=12.0,
        last_token_s=last_s,
    )  # fmt: skip


async def test_times_and_tokens_of_an_answer() -> None:
    found = await left(tally(4, cached=5))
    assert found["kvota_request_queue_seconds_sum"] == 0
    assert found["kvota_time_to_first_token_seconds_sum"] == 2
    assert found["kvota_time_per_output_token_seconds_sum"] == 1
    assert found["kvota_request_seconds_sum"] == 8
    assert found["kvota_prompt_tokens_total"] == 7
    assert found["kvota_output_tokens_total"] == 4
    assert found["kvota_prefix_hit_tokens_total"] == 5


async def test_a_gap_is_that_of_one_choice() -> None:
    """Two choices of four tokens in 3 s: a token a second, each."""
    assert (await left(tally(8), n=2))["kvota_time_per_output_token_seconds_sum"] == 1


@pytest.mark.parametrize("given", [tally(1), tally(9, last_s=12.0)])
async def test_one_token_or_all_at_once_have_no_gap(given: Tally) -> None:
    found = await left(given)
    assert found["kvota_time_per_output_token_seconds_count"] == 0
    assert found["kvota_request_seconds_count"] == 1


async def test_what_was_never_answered_has_waited_and_nothing_else() -> None:
    found = await left(None, Tally(prompt_tokens=7))
    assert found["kvota_request_queue_seconds_count"] == 2
    assert found["kvota_request_seconds_count"] == found["kvota_prompt_tokens_total"] == 0


async def test_no_figure_for_cached_tokens_where_the_backend_says_nothing_of_them() -> None:
    assert "kvota_prefix_hit_tokens_total" not in await left(tally(4))


async def test_errors_of_predictions_are_absolute() -> None:
    metrics = DeskMetrics()
    records = metrics.of("gpu")
    assert metrics.of("gpu") is records
    records.forecast_judged(10.0, 40)
    records.wait_judged(5.0, 3.0)
    records.retry_judged(4.0, 9.0)
    found = samples(metrics)
    assert found["kvota_forecast_error_tokens_sum"] == 30
    assert found["kvota_eta_error_seconds_sum"] == 2
    assert found["kvota_retry_after_error_seconds_sum"] == 5

"""Six stations add up to a request. The oracle is a bill drawn up by hand."""

import pytest

from kvota.tools.doctor.page import Page
from kvota.tools.doctor.stations import stations
from kvota.tools.doctor.window import Reading, Window

COUNT = 10


def summed(name: str, mean_s: float) -> str:
    return f"{name}_count {COUNT}\n{name}_sum {COUNT * mean_s}\n"


# A node: 1 s in line, 0.5 s of prefill, 20 tokens after the first at 0.1 s each, 0.25 s to write.
NODE = (
    summed("kvota_request_queue_seconds", 1.0)
    + summed("kvota_time_to_first_token_seconds", 1.5)
    + summed("kvota_time_per_output_token_seconds", 0.1)
    + summed("kvota_request_seconds", 1.5 + 2.0 + 0.25)
    + f"kvota_output_tokens_total {21 * COUNT}\nkvota_requests_waiting 3\n"
)
# The gateway before it: 0.125 s at the door, and half a second longer until the client has all.
GATEWAY = (
    summed("kvota_gateway_time_to_first_token_seconds", 0.125 + 1.5)
    + summed("kvota_gateway_request_seconds", 0.125 + 3.75 + 0.5)
    + "kvota_gateway_requests_open 1\n"
)


def bill(page: str) -> dict[str, float | None]:
    readings = [Reading(at_s=0.0, page=Page()), Reading(at_s=60.0, page=Page.parse(page))]
    return {one.name: one.mean_s for one in stations(Window(readings))}


def test_behind_a_gateway_every_station_has_its_part() -> None:
    found = bill(GATEWAY + NODE)
    assert found == pytest.approx(
        {"client": 0.5, "door": 0.125, "line": 1.0, "prefill": 0.5, "decode": 2.0, "stream": 0.25}
    )
    assert sum(value or 0.0 for value in found.values()) == pytest.approx(0.125 + 3.75 + 0.5)


def test_a_node_alone_measures_no_door_and_writes_to_the_client_itself() -> None:
    found = bill(NODE)
    assert (found["door"], found["stream"]) == (None, None)
    assert found["client"] == pytest.approx(0.25)
    assert sum(value or 0.0 for value in found.values()) == pytest.approx(3.75)


def test_a_gateway_of_foreign_engines_tells_before_and_after_the_first_token() -> None:
    found = bill(GATEWAY)
    assert found["prefill"] == pytest.approx(1.625)
    assert found["decode"] == pytest.approx(2.75)
    assert [name for name, value in found.items() if value is None] == [
        "client", "door", "line", "stream"
    ]  # fmt: skip


def test_a_node_that_times_its_stations_is_believed() -> None:
    found = bill(
        GATEWAY + NODE + summed("kvota_decode_seconds", 1.75) + summed("kvota_stream_seconds", 0.5)
    )
    assert (found["decode"], found["stream"]) == (1.75, 0.5)
    assert sum(value or 0.0 for value in found.values()) == pytest.approx(0.125 + 3.75 + 0.5)


def test_a_gateway_that_keeps_the_line_itself_tells_door_line_and_the_rest() -> None:
    found = bill(
        GATEWAY
        + summed("kvota_gateway_door_seconds", 0.125)
        + summed("kvota_gateway_queue_seconds", 1.125)
    )
    assert found["door"] == pytest.approx(0.125)
    assert found["line"] == pytest.approx(1.0)
    assert found["prefill"] == pytest.approx(0.5)
    assert found["decode"] == pytest.approx(2.75)
    assert sum(value or 0.0 for value in found.values()) == pytest.approx(0.125 + 3.75 + 0.5)


def test_decoding_never_takes_more_than_there_is() -> None:
    crowded = NODE.replace(f"tokens_total {21 * COUNT}", f"tokens_total {900 * COUNT}")
    found = bill(crowded)
    assert found["decode"] == pytest.approx(2.25)
    assert found["client"] == pytest.approx(0.0)


def test_who_is_in_line_now_is_counted() -> None:
    readings = [Reading(at_s=0.0, page=Page()), Reading(at_s=60.0, page=Page.parse(NODE))]
    line = next(one for one in stations(Window(readings)) if one.name == "line")
    assert line.num_now == 3

"""What a reader of a node's page finds at a gateway that keeps desks for foreign engines."""

from prometheus_client.parser import text_string_to_metric_families

from kvota.core.clock import ManualClock
from kvota.core.request import Band
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Granted, Queued, Refused, Ticket
from kvota.gateway.desk_page import Desk as Row
from kvota.gateway.desk_page import DeskPage, KnownMemory

SETTINGS = DeskSettings(admission=Admission.RESERVE, max_running_requests=1, max_waiting_queue=1)


def ticket(number: int) -> Ticket:
    return Ticket(
        id=f"{number}", tenant="t", model="m", prompt_tokens=10, max_tokens=10, arrived_s=0.0,
        band=Band.INTERACTIVE,
    )  # fmt: skip


def samples(*rows: Row) -> dict[str, float]:
    families = text_string_to_metric_families(DeskPage(lambda: rows).render().decode())
    return {
        "|".join(
            [sample.name, *(value for _, value in sorted(sample.labels.items()))]
        ): sample.value
        for family in families
        for sample in family.samples
    }


def full_desk() -> Desk:
    """One runs, one waits, one was refused."""
    desk, now = Desk(100, SETTINGS, Forecast(), block_size=1), ManualClock().now()
    assert isinstance(desk.arrive(ticket(1), now), Granted)
    assert isinstance(desk.arrive(ticket(2), now), Queued)
    assert isinstance(desk.arrive(ticket(3), now), Refused)
    return desk


def test_a_desk_is_shown_under_the_names_of_a_node() -> None:
    found = samples(Row("gpu-1", full_desk().snapshot(), SETTINGS))
    assert found["kvota_requests_running|gpu-1|short"] == 1
    assert found["kvota_requests_waiting|gpu-1|interactive|short"] == 1
    assert found["kvota_rejected_total|gpu-1|queue_full"] == 1
    assert found["kvota_desk_limit|gpu-1|max_running_requests"] == 1
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 1


def test_kv_usage_is_that_of_all_desks_together() -> None:
    busy, idle = full_desk().snapshot(), Desk(300, SETTINGS, Forecast(), block_size=1).snapshot()
    found = samples(Row("gpu-1", busy, SETTINGS), Row("gpu-2", idle, SETTINGS))
    assert found["kvota_kv_cache_usage_ratio"] == busy.held_tokens / 400
    assert found["vllm:kv_cache_usage_perc"] == found["kvota_kv_cache_usage_ratio"]


def test_blocks_are_those_of_the_backend_where_it_says_how_large_they_are() -> None:
    now = full_desk().snapshot()  # 20 of 100 tokens are lent, at the most
    found = samples(Row("gpu-1", now, SETTINGS, KnownMemory(112, 16, 17, -3)))
    assert found["kvota_kv_blocks|gpu-1|used"] == -(-now.held_tokens // 16)
    assert found["kvota_kv_blocks|gpu-1|free"] == (100 - now.held_tokens) // 16
    assert found["kvota_kv_blocks|gpu-1|outside"] == 2
    assert found["kvota_kv_ledger_difference_tokens|gpu-1"] == -3
    assert found["vllm:cache_config_info|16|gpu-1|7"] == 1


def test_blocks_are_tokens_where_it_does_not_and_nothing_where_the_capacity_is_a_guess() -> None:
    now = full_desk().snapshot()
    rows = (Row("stated", now, SETTINGS, KnownMemory(100)), Row("guessed", now, SETTINGS))
    found = samples(*rows)
    assert found["kvota_kv_blocks|stated|used"] == now.held_tokens
    assert found["vllm:cache_config_info|1|stated|100"] == 1
    assert not [name for name in found if "kv_blocks" in name and "guessed" in name]
    assert "kvota_kv_blocks|stated|outside" not in found
    assert "kvota_kv_ledger_difference_tokens|stated" not in found


def test_a_gateway_without_a_desk_adds_nothing_to_its_page() -> None:
    assert DeskPage(tuple).render() == b""

"""Against the figures that were computed from the same files when they were collected."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.traffic.arrival import Arrival
from kvota.traffic.numbers import LengthFigures, Shape
from kvota.traffic.opening import open_traffic
from kvota.traffic.servegen import read_clients
from kvota.traffic.shape import shape_of, shape_of_clients
from kvota.traffic.traces import TraceError

TRACES = Path("bench/traces")
ALL_TRACES = Path(os.environ.get("KVOTA_TRACES", "../shared/traces"))
needs_all_traces = pytest.mark.skipif(
    not ALL_TRACES.is_dir(), reason=f"the whole public traces are not in {ALL_TRACES}"
)


def shape_in(path: Path) -> Shape:
    return shape_of(open_traffic(path, spreads=False).arrivals)


def rounded(figures: LengthFigures) -> tuple[int, ...]:
    return tuple(
        int(value + 0.5)
        for value in (figures.mean, figures.p50, figures.p95, figures.p99, figures.max)
    )


def bursts(shape: Shape) -> list[tuple[float, float]]:
    return [(round(one.idc, 1), round(one.peak, 1)) for one in shape.bursts]


def test_azure_conversation() -> None:
    shape = shape_in(TRACES / "azure_conv_2023.csv.gz")
    assert shape.num_requests == 19_366
    assert rounded(shape.prompt) == (1155, 1020, 4083, 4142, 14_050)
    assert rounded(shape.output) == (211, 129, 451, 601, 1000)
    assert round(shape.prompt_to_output, 1) == 5.5
    assert round(shape.correlation, 2) == -0.11
    assert (round(shape.span_s), round(shape.rate_rps, 2)) == (3502, 5.53)
    assert round(shape.gap_cv, 2) == 1.09
    assert bursts(shape) == [(1.4, 2.9), (4.0, 1.8), (20.6, 1.5)]
    assert (round(shape.long_requests, 3), round(shape.long_tokens, 2)) == (0.021, 0.08)
    assert shape.reuse is None


@needs_all_traces
def test_azure_code() -> None:
    shape = shape_in(ALL_TRACES / "AzureLLMInferenceTrace_code_2023.csv")
    assert shape.num_requests == 8819
    assert rounded(shape.prompt) == (2048, 1469, 7303, 7436, 7437)
    assert rounded(shape.output)[1:3] == (13, 90)
    assert round(shape.output.mean, 1) == 27.9
    assert (round(shape.span_s), round(shape.rate_rps, 2)) == (3436, 2.57)
    assert round(shape.gap_cv, 1) == 13.2
    assert bursts(shape) == [(13.2, 26.1), (71.3, 12.8), (160.5, 4.2)]
    assert (round(shape.long_requests, 2), round(shape.long_tokens, 2)) == (0.14, 0.42)


@needs_all_traces
def test_mooncake_conversation() -> None:
    shape = shape_in(ALL_TRACES / "mooncake_conversation_trace.jsonl.gz")
    assert shape.num_requests == 12_031
    assert rounded(shape.prompt) == (12_035, 6909, 39_551, 85_400, 126_195)
    assert rounded(shape.output) == (343, 350, 698, 1119, 2000)
    assert round(shape.correlation, 2) == 0.07
    assert round(shape.gap_cv, 2) == 3.03
    assert bursts(shape) == [(7.9, 8.2), (2.1, 2.0), (2.8, 1.2)]
    assert (round(shape.long_requests, 2), round(shape.long_tokens, 2)) == (0.66, 0.95)
    reuse = shape.reuse
    assert reuse is not None
    assert (reuse.num_hits, reuse.num_blocks, reuse.num_distinct) == (105_710, 288_500, 182_790)
    assert round(reuse.token_share, 4) == 0.3736
    assert round(reuse.once_share, 3) == 0.758
    assert round(reuse.sharing_requests * 12_031) == 12_030
    assert [round(value) for value in reuse.again_after_s] == [114, 519, 1578]


@needs_all_traces
def test_mooncake_synthetic() -> None:
    shape = shape_in(ALL_TRACES / "mooncake_synthetic_trace.jsonl.gz")
    assert rounded(shape.prompt) == (15_325, 11_587, 48_905, 66_456, 191_378)
    assert rounded(shape.output) == (149, 69, 519, 768, 893)
    assert bursts(shape) == [(1.1, 3.3), (1.4, 1.4), (13.0, 1.2)]
    reuse = shape.reuse
    assert reuse is not None
    assert (reuse.num_hits, reuse.num_blocks, reuse.num_distinct) == (77_953, 121_877, 43_924)
    assert round(reuse.sharing_requests, 3) == 0.446
    assert [round(value) for value in reuse.again_after_s] == [59, 282, 583]


@needs_all_traces
def test_sharegpt_lengths() -> None:
    shape = shape_in(ALL_TRACES / "sharegpt_8k_lengths_llama2.csv.gz")
    assert shape.num_requests == 30_731
    assert rounded(shape.prompt) == (2340, 1730, 6563, 7434, 8141)
    assert rounded(shape.output) == (439, 415, 920, 998, 1024)
    assert (round(shape.long_requests, 2), round(shape.long_tokens, 2)) == (0.22, 0.52)


@needs_all_traces
def test_servegen_clients() -> None:
    shape = shape_of_clients(read_clients(ALL_TRACES / "servegen_deepseek-r1_clients.jsonl.gz"))
    assert (shape.num_clients, shape.hours) == (73, 24.0)
    assert (round(shape.rate_rps, 1), round(shape.lowest_rps, 1)) == (16.0, 4.3)
    assert round(shape.highest_rps, 1) == 42.5
    assert rounded(shape.prompt) == (1265, 208, 6704, 23_408, 57_280)
    assert rounded(shape.output)[1:] == (784, 5696, 12_592, 32_768)
    assert shape.output.mean == pytest.approx(1521, abs=1)
    assert {num: round(100 * share, 1) for num, share in shape.top_clients.items()} == {
        1: 28.6, 5: 52.5, 10: 67.7, 25: 90.1, 50: 99.1,
    }  # fmt: skip


def arrival(at_s: float, prompt: int = 10, output: int = 2, tenant: str = "a") -> Arrival:
    return Arrival(
        at_s=at_s, prompt_tokens=prompt, output_tokens=output, max_tokens=output, tenant=tenant
    )


def test_even_arrivals_are_not_bursty() -> None:
    shape = shape_of(arrival(0.5 * number) for number in range(240))
    assert shape.gap_cv == pytest.approx(0.0, abs=1e-9)
    assert [(one.window_s, one.idc, one.peak) for one in shape.bursts] == [
        (1, 0.0, 1.0), (10, 0.0, 1.0), (60, 0.0, 1.0),
    ]  # fmt: skip


def test_the_busiest_tenants_are_counted() -> None:
    shape = shape_of(arrival(at, tenant="big" if at < 8 else "small") for at in range(10))
    assert (shape.num_tenants, shape.top_tenants) == (2, {1: 0.8})


def test_nothing_has_no_shape() -> None:
    with pytest.raises(TraceError, match="No request"):
        shape_of([])


@given(
    st.lists(
        st.builds(
            arrival,
            st.floats(0, 1e5, allow_nan=False),
            st.integers(1, 9000),
            st.integers(1, 900),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_figures_are_ordered_and_finite_for_any_traffic(arrivals: list[Arrival]) -> None:
    shape = shape_of(arrivals)
    for figures in (shape.prompt, shape.output):
        assert figures.p50 <= figures.p95 <= figures.p99 <= figures.max
    assert shape.prompt.max == max(one.prompt_tokens for one in arrivals)
    assert all(one.peak >= 1 - 1e-9 and one.idc >= 0 for one in shape.bursts)
    assert -1.000001 <= shape.correlation <= 1.000001

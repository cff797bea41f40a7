"""Against the statistics that were computed from the traces when they were collected."""

import os
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import msgspec
import pytest

from kvota.telemetry.journal import JournalLine
from kvota.traffic.arrival import Arrival, prompt_of
from kvota.traffic.traces import (
    PassedOver,
    TraceError,
    read_azure,
    read_mooncake,
    read_own_journal,
    read_sharegpt,
    spread,
)

TRACES = Path("bench/traces")
ALL_TRACES = Path(os.environ.get("KVOTA_TRACES", "../shared/traces"))
needs_all_traces = pytest.mark.skipif(
    not ALL_TRACES.is_dir(), reason=f"the whole public traces are not in {ALL_TRACES}"
)


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[int(share * len(values))]


def test_azure_conversation_has_its_published_shape() -> None:
    arrivals = list(read_azure(TRACES / "azure_conv_2023.csv.gz"))
    prompts = [one.prompt_tokens for one in arrivals]
    outputs = [one.output_tokens for one in arrivals]
    assert len(arrivals) == 19_366
    assert (round(fmean(prompts)), quantile(prompts, 0.5), max(prompts)) == (1155, 1020, 14_050)
    assert (round(fmean(outputs)), quantile(outputs, 0.5), max(outputs)) == (211, 129, 1000)
    assert round(arrivals[-1].at_s) == 3502
    assert all(before.at_s <= after.at_s for before, after in pairwise(arrivals))


def test_an_output_is_never_longer_than_what_the_client_allows() -> None:
    arrivals = list(read_azure(TRACES / "azure_conv_2023.csv.gz", max_tokens=100))
    assert max(one.output_tokens for one in arrivals) == 100


def test_mooncake_prompts_are_covered_by_their_blocks() -> None:
    arrivals = list(read_mooncake(TRACES / "mooncake_conversation_head.jsonl.gz"))
    assert len(arrivals) == 400
    assert all(len(one.prefix) == -(-one.prompt_tokens // 512) for one in arrivals)
    assert all(prompt_of(one, 0)[:100] == prompt_of(arrivals[0], 0)[:100] for one in arrivals)


def block_hits(arrivals: list[Arrival]) -> tuple[int, int]:
    """Hits and lookups of full blocks, in a cache of any size."""
    seen: set[int] = set()
    hits = lookups = 0
    for one in arrivals:
        full = one.prefix[: one.prompt_tokens // 512]
        lookups += len(full)
        hits += next((at for at, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
    return hits, lookups


@needs_all_traces
def test_all_of_mooncake_reuses_what_was_computed_for_it() -> None:
    conversation = list(read_mooncake(ALL_TRACES / "mooncake_conversation_trace.jsonl.gz"))
    assert len(conversation) == 12_031
    assert block_hits(conversation) == (105_592, 276_491)
    synthetic = list(read_mooncake(ALL_TRACES / "mooncake_synthetic_trace.jsonl.gz"))
    assert block_hits(synthetic) == (77_740, 117_888)


@needs_all_traces
def test_sharegpt_lengths_come_at_poisson_times() -> None:
    path = ALL_TRACES / "sharegpt_8k_lengths_llama2.csv.gz"
    arrivals = list(read_sharegpt(path, rate_rps=5.0, rng=Random(1)))
    assert len(arrivals) == 30_731
    assert round(fmean(one.prompt_tokens for one in arrivals)) == 2340
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, abs=0.03)


@needs_all_traces
def test_azure_code_has_its_published_shape() -> None:
    arrivals = list(read_azure(ALL_TRACES / "AzureLLMInferenceTrace_code_2023.csv"))
    assert len(arrivals) == 8819
    assert round(fmean(one.prompt_tokens for one in arrivals)) == 2048


def test_spreading_keeps_the_order_and_the_bucket() -> None:
    arrivals = list(read_mooncake(TRACES / "mooncake_conversation_head.jsonl.gz"))
    scattered = list(spread(arrivals, 3.0, Random(5)))
    assert [one.prefix for one in scattered] == [one.prefix for one in arrivals]
    for before, after in zip(arrivals, scattered, strict=True):
        assert before.at_s // 3 * 3 <= after.at_s <= before.at_s // 3 * 3 + 3
    assert all(before.at_s <= after.at_s for before, after in pairwise(scattered))
    assert len({one.at_s for one in scattered}) > len({one.at_s for one in arrivals})


def test_a_broken_row_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,12,many\n")
    with pytest.raises(TraceError, match=r"broken\.csv:2"):
        list(read_azure(path))


def journal_of(path: Path, *lines: JournalLine) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def journal_line(at: float, outcome: str = "completed", **fields: Any) -> JournalLine:
    return JournalLine(
        v=1, at=at, id=f"r{at}", model="m", outcome=outcome, prompt_tokens=600,
        **{"output_tokens": 20, "total_s": 1.0, **fields},
    )  # fmt: skip


def test_a_journal_is_served_in_order_of_arrival(tmp_path: Path) -> None:
    path = journal_of(
        tmp_path / "j", journal_line(12.0, prefix=(5, 6)), journal_line(10.0, n=2, tenant="a")
    )
    first, second = read_own_journal(path)
    assert (first.at_s, first.tenant, first.n, first.output_tokens) == (0.0, "a", 2, 10)
    assert (second.at_s, second.output_tokens, second.prefix) == (2.0, 20, (5, 6))
    assert len(prompt_of(second, 1)) == 600
    assert prompt_of(second, 1)[:512] == prompt_of(second, 2)[:512]


def test_what_got_no_answer_counts_with_all_that_was_allowed(tmp_path: Path) -> None:
    path = journal_of(
        tmp_path / "j",
        journal_line(1.0, "refused", output_tokens=0, max_tokens=300),
        journal_line(2.0, "client_closed", output_tokens=3),
        journal_line(3.0, "invalid", output_tokens=0),
    )
    assert [one.output_tokens for one in read_own_journal(path, max_tokens=64)] == [300, 64]


def test_embeddings_in_a_journal_are_passed_over(tmp_path: Path) -> None:
    path = journal_of(
        tmp_path / "j",
        journal_line(1.0, endpoint="embeddings", output_tokens=0),
        journal_line(2.0, endpoint="completions", output_tokens=7, max_tokens=9),
    )
    passed_over = PassedOver()
    assert [one.output_tokens for one in read_own_journal(path, passed_over=passed_over)] == [7]
    assert passed_over.num == 1


def test_a_file_that_is_no_journal_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"v": 1}\n{"v": 1}\n')
    with pytest.raises(TraceError, match="line 1"):
        list(read_own_journal(tmp_path / "j"))

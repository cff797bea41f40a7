"""What both testers tell, read and compared; and that kvota's tester tells the known truth."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.tester_vs_aiperf_figures import (
    Figures,
    NotComparable,
    Told,
    Wanted,
    differences,
    is_near,
    medians,
    of_aiperf,
    of_node,
    of_seen,
    of_told,
    relative,
    table,
)
from bench.tester_vs_aiperf_places import Place
from bench.tester_vs_aiperf_runs import aiperf_command, prompts_of
from bench.tester_vs_aiperf_server import token_moments
from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.generator import Generator
from kvota.tools.load.prompts import Words
from kvota.tools.load.stream import StreamRecord
from kvota.tools.top.samples import Samples
from tests.support.fake_backend import DONE, chunk, event, piece, usage_of
from tests.tools.load.virtual_time import LoopClock, in_virtual_time

WANTED = Wanted(num_requests=12, concurrency=3, prompt_tokens=10, output_tokens=17)
PATH = "/v1/completions"


class KnownServer:
    """A sender whose answers come at moments of its own choosing, in virtual time.

    What it sends are the bytes of a server; reading them is left to the tester's own record.
    """

    def __init__(self) -> None:
        self.told: list[tuple[float, list[float]]] = []
        self._clock = LoopClock()

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        assert origin_s is not None
        came_s, left_s = self._clock.now(), list[float]()
        moments = token_moments(len(self.told), asked.max_tokens)
        self.told.append((came_s, left_s))
        record = StreamRecord(self._clock, origin_s + asked.scheduled_s)
        record.begin(200, {})
        record.feed(text(""))
        for at, moment in enumerate(moments):
            await asyncio.sleep(came_s + moment - self._clock.now())
            left_s.append(self._clock.now())
            record.feed(text(f" w{at}", is_last=at == len(moments) - 1))
        await asyncio.sleep(0.5)
        usage = usage_of(WANTED.prompt_tokens, asked.max_tokens)
        record.feed(event(chunk(PATH, [], usage=usage)) + DONE)
        record.finish()
        return record.seen(asked, sent_s=came_s - origin_s - asked.scheduled_s)


def text(word: str, *, is_last: bool = False) -> bytes:
    return event(chunk(PATH, [piece(PATH, word, 0, "length" if is_last else None)]))


def requests() -> Iterator[Asked]:
    while True:
        yield Asked(prompt="a", max_tokens=WANTED.output_tokens)


def measured() -> tuple[list[Seen], Told]:
    """What kvota's generator saw of the known server, and what the server knows."""
    server = KnownServer()
    keeping = Generator(server, LoopClock()).keep(
        requests(), WANTED.concurrency, seconds=1e4, num_max=WANTED.num_requests
    )
    return in_virtual_time(keeping).seen, server.told


def test_kvotas_tester_tells_the_truth_of_a_server_whose_timing_is_known() -> None:
    seen, told = measured()
    apart = differences(of_seen(seen, WANTED), of_told(told))
    assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=1e-9)


def test_the_truth_of_the_known_server_is_its_script() -> None:
    """Of one request: the first token after 200 ms, 14 gaps of 20 ms and 2 stalls of 60 ms."""
    left_s = [5.0 + moment for moment in token_moments(0, 17)]
    truth = of_told([(5.0, left_s)])
    assert (truth["ttft_mean"], truth["ttft_p50"]) == pytest.approx((200.0, 200.0))
    assert truth["itl_mean"] == pytest.approx((14 * 20 + 2 * 60) / 16)
    assert truth["tokens_per_s"] == pytest.approx(17 / (0.2 + 0.4))


def test_who_counts_an_empty_event_or_the_usage_is_seen_to_be_wrong() -> None:
    _, told = measured()
    truth = of_told(told)
    too_early = of_told([(came_s, [came_s, *left_s]) for came_s, left_s in told])
    too_late = of_told([(came_s, [*left_s, left_s[-1] + 0.5]) for came_s, left_s in told])
    assert not is_near(differences(too_early, truth))
    assert not is_near(differences(too_late, truth))


def aiperf_page(**changes: Any) -> str:
    """An export, as aiperf 0.13.0 writes it, without what is not read."""
    metrics = {
        "request_count": {"unit": "requests", "avg": 12.0},
        "time_to_first_token": {"unit": "ms", "avg": 25.8, "p50": 24.7, "p99": 36.6},
        "inter_token_latency": {"unit": "ms", "avg": 24.0, "p50": 22.9},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 153.3},
        "output_sequence_length": {"unit": "tokens", "avg": 17.0, "min": 17.0, "max": 17.0},
        "input_sequence_length": {"unit": "tokens", "avg": 10.0, "min": 10.0, "max": 10.0},
    }
    return json.dumps({"schema_version": "1.4", **metrics, **changes})


def test_aiperfs_export_is_read() -> None:
    assert of_aiperf(aiperf_page(), WANTED) == {
        "ttft_mean": 25.8,
        "ttft_p50": 24.7,
        "itl_mean": 24.0,
        "itl_p50": 22.9,
        "tokens_per_s": 153.3,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_count": {"avg": 11.0}}, "11 of 12 requests"),
        ({"error_request_count": {"avg": 1.0}}, "1 requests failed"),
        ({"output_sequence_length": {"min": 16.0, "max": 17.0}}, "16 output tokens, not 17"),
        ({"input_sequence_length": {"min": 10.0, "max": 11.0}}, "11.0 prompt tokens, not 10"),
        ({"time_to_first_token": {"unit": "ns", "avg": 1, "p50": 1}}, "latency in ns"),
        ({"inter_token_latency": {"unit": "ms"}}, "has no 'avg'"),
    ],
)
def test_a_run_of_aiperf_that_is_not_what_was_asked_for_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotComparable, match=reason):
        of_aiperf(aiperf_page(**changes), WANTED)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Wanted(num_requests=13, concurrency=3, prompt_tokens=10, output_tokens=17), "12 of 13"),
        (Wanted(num_requests=12, concurrency=3, prompt_tokens=9, output_tokens=17), "10 prompt"),
        (Wanted(num_requests=12, concurrency=3, prompt_tokens=10, output_tokens=18), "17 output"),
    ],
)
def test_a_run_of_kvotas_tester_that_is_not_what_was_asked_for_is_refused(
    wanted: Wanted, reason: str
) -> None:
    seen, _ = measured()
    with pytest.raises(NotComparable, match=reason):
        of_seen(seen, wanted)


def figures(scale: float = 1.0) -> Figures:
    return {
        "ttft_mean": 100 * scale,
        "ttft_p50": 90,
        "itl_mean": 20,
        "itl_p50": 20,
        "tokens_per_s": 50,
    }


def test_one_figure_more_than_5_percent_off_is_not_near() -> None:
    assert is_near(differences(figures(1.049), figures()))
    assert not is_near(differences(figures(1.051), figures()))
    assert not is_near(differences(figures(0.949), figures()))


def test_one_bad_round_of_three_does_not_count() -> None:
    assert medians([figures(), figures(9.0), figures(1.02)]) == figures(1.02)


def test_the_table_says_how_far_the_first_is_from_each_other() -> None:
    lines = table({"kvota": figures(1.1), "aiperf": figures()}).splitlines()
    assert lines[0] == "|  | kvota | aiperf | kvota / aiperf |"
    assert lines[2] == "| TTFT mean, ms | 110.0 | 100.0 | +10.0% |"


def node_page(num: int, ttft_s: float, itl_s: float) -> Samples:
    """The sums of `num` requests so far."""
    first, each = "kvota_time_to_first_token_seconds", "kvota_time_per_output_token_seconds"
    return Samples.parse(
        f"{first}_sum {num * ttft_s}\n{first}_count {num}\n"
        f"{each}_sum {num * itl_s}\n{each}_count {num}\n"
    )


def test_a_node_tells_means_of_the_requests_between_two_looks() -> None:
    wanted = Wanted(num_requests=30, concurrency=1, prompt_tokens=1, output_tokens=11)
    inside = of_node(node_page(10, 0.1, 0.02), node_page(40, 0.25, 0.05), wanted)
    assert inside == pytest.approx(
        {"ttft_mean": 300.0, "itl_mean": 60.0, "tokens_per_s": 11 / (0.3 + 10 * 0.06)}
    )
    with pytest.raises(NotComparable, match="nothing new"):
        of_node(node_page(10, 0.1, 0.02), node_page(10, 0.1, 0.02), wanted)


def test_a_node_that_was_slower_in_one_run_does_not_count() -> None:
    fast, slow = figures(), {name: 2 * value for name, value in figures().items()}
    inside = {"ttft_mean": 95.0, "itl_mean": 19.0}
    twice = {name: 2 * value for name, value in inside.items()}
    assert not is_near(differences(fast, slow))
    apart = differences(relative(fast, inside), relative(slow, twice))
    assert apart == pytest.approx({"ttft_mean": 0.0, "itl_mean": 0.0})


def test_a_table_leaves_out_what_only_one_of_them_tells() -> None:
    assert "p50" not in table({"kvota": figures(), "node": {"ttft_mean": 1.0, "itl_mean": 1.0}})


PLACE = Place(url="http://127.0.0.1:1", model="m", words=Words([" a", " b"], overhead=1))


def test_every_request_of_every_run_has_a_prompt_of_its_own() -> None:
    wanted = Wanted(num_requests=50, concurrency=5, prompt_tokens=40, output_tokens=2)
    prompts = [prompt for key in ("1", "2") for prompt in prompts_of(PLACE, wanted, key)]
    assert len(prompts) == len(set(prompts)) == 110
    assert {len(prompt.split()) for prompt in prompts} == {40}


def test_aiperf_is_told_the_same_operating_point(tmp_path: Path) -> None:
    command = aiperf_command(PLACE, WANTED, tmp_path / "tokenizer", tmp_path)
    told = dict(itertools.pairwise(command))
    assert told["--concurrency"] == told["--warmup-request-count"] == "3"
    assert (told["--request-count"], told["--osl"]) == ("12", "17")
    extra = [command[at + 1] for at, part in enumerate(command) if part == "--extra-inputs"]
    assert extra == ["ignore_eos:true", "min_tokens:17", "temperature:0"]

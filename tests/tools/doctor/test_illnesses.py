"""Each illness is created in a live node, and found by its name, its numbers and its remedy."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest

from kvota.kv.cache import KVCache
from kvota.model.compiled import return_free_memory
from kvota.tools.doctor.diagnosis import diagnose
from kvota.tools.doctor.finding import Level
from kvota.tools.doctor.memory import GROWTH_BYTES
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.watch import Patient, watch
from kvota.tools.doctor.window import Window
from tests.support.http_client import CHAT, Reply
from tests.support.live_node import LiveNode, live_node, until
from tests.support.raw_http import RawConnection, post_bytes
from tests.support.stage import Stage
from tests.tools.doctor.ward import CostlyStage, ward

SLOW_S = 0.02  # a step of a stage that has to stay busy
LONG = 900  # tokens; with SLOW_S, longer than any test


@contextmanager
def busy(node: LiveNode, *calls: Callable[[], Reply]) -> Iterator[None]:
    """The calls are under way during the block; what is left of them then is cut."""
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            yield
        finally:
            node.on_loop(node.parts.runner.drain)
            for view in node.get("/admin/requests").json["data"]:
                node.http.delete(f"/admin/requests/{view['id']}")
            for future in futures:
                future.result(30)


def many(call: Callable[[], Reply], number: int) -> list[Reply]:
    with ThreadPoolExecutor(number) as pool:
        return [future.result(60) for future in [pool.submit(call) for _ in range(number)]]


def test_a_healthy_server_gets_no_word() -> None:
    with live_node() as node, ward(node.url, ended=12, num_looks=3) as examined:
        for _ in range(3):
            replies = many(lambda: node.chat("Tell me about the sea. " * 8, max_tokens=20), 4)
            assert {reply.status for reply in replies} == {200}
        node.wait_idle()
    assert examined.names == []
    assert examined.found.num_ended == 12
    assert examined.found.verdict.startswith("No problem in the last")
    for station in ("line", "prefill", "decode", "client"):
        assert examined.mean_s(station) is not None
    assert examined.mean_s("door") is None  # no gateway is there to measure it


def test_an_idle_server_gives_nothing_to_judge_by() -> None:
    with live_node() as node, ward(node.url) as examined:
        pass
    assert examined.names == []
    assert "no request" in examined.found.verdict


def test_a_full_line_is_told_with_the_places_that_bind() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with live_node(stage, max_running_requests=1, max_waiting_queue=1) as node:
        running = [lambda: node.chat(max_tokens=LONG)] * 2
        with busy(node, *running), ward(node.url, ended=3) as examined:
            until(lambda: node.num_open == 2, "one to run and one to wait")
            assert [node.chat(max_tokens=2).status for _ in range(3)] == [503] * 3
    found = examined.the("refusing: queue_full")
    assert found.level is Level.PROBLEM
    assert found.said.startswith("3 of 3 requests (100%)")
    assert "all 1 places are taken" in found.means
    assert "(max_waiting_queue = 1)" in found.means
    assert "max_running_requests above 1" in found.change
    assert examined.names == ["refusing: queue_full"]
    assert examined.found.verdict == "Refusing: queue_full."


def test_a_full_line_is_told_with_the_memory_that_binds() -> None:
    stage = Stage(num_blocks=8)
    stage.step_s = SLOW_S
    with live_node(stage, admission="reserve", max_waiting_queue=1) as node:
        running = [lambda: node.complete("hi", max_tokens=100)] * 2
        with busy(node, *running), ward(node.url, ended=1) as examined:
            until(lambda: node.num_open == 2, "one to run and one to wait")
            assert node.complete("hi", max_tokens=100).status == 503
    found = examined.the("refusing: queue_full")
    assert "waiting for: KV memory" in found.means
    assert "kv_memory" in found.change


def test_requests_that_can_never_be_served() -> None:
    with live_node() as node, ward(node.url, ended=6) as examined:
        assert {node.chat(max_tokens=5000).status for _ in range(6)} == {400}
    assert examined.names == ["clients ask for what cannot be"]
    assert "max_model_len" in examined.the("clients ask for what cannot be").change


def test_who_waits_in_vain_is_told_with_what_it_waited_for() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with (
        live_node(stage, max_running_requests=1, queue_timeout_s=0.2) as node,
        busy(node, lambda: node.chat(max_tokens=LONG)),
        ward(node.url, ended=1) as examined,
    ):
        until(lambda: node.num_running == 1, "one to run")
        assert node.chat(max_tokens=2).error["code"] == "queue_timeout"
    found = examined.the("refusing: queue_timeout")
    assert "(queue_timeout_s = 0.2)" in found.means
    assert "max_num_seqs" not in found.change


def test_a_server_that_is_being_stopped_is_not_ready() -> None:
    with live_node() as node, ward(node.url, ended=1) as examined:
        node.drain()
        assert node.chat(max_tokens=2).error["code"] == "draining"
    assert examined.names[0] == "not ready"
    assert "refusing: draining" in examined.names


def test_first_tokens_that_are_late_for_queueing() -> None:
    stage = CostlyStage(sequence_s=SLOW_S)
    with (
        live_node(stage, max_running_requests=1) as node,
        ward(node.url, ended=4, ttft_s=0.3) as examined,
    ):
        assert {reply.status for reply in many(lambda: node.chat(max_tokens=20), 4)} == {200}
    found = examined.the("TTFT is queueing, not prefill")
    assert "in line" in found.said
    assert "max_running_requests" in found.change
    line_s, prefill_s = examined.mean_s("line"), examined.mean_s("prefill")
    assert line_s is not None
    assert prefill_s is not None
    assert line_s > prefill_s


def test_first_tokens_that_nobody_has_got_yet() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with live_node(stage, max_running_requests=1) as node:
        running = [lambda: node.chat(max_tokens=LONG)] * 2
        with busy(node, *running), ward(node.url, ttft_s=0.0) as examined:
            until(lambda: node.num_open == 2, "one to run and one to wait")
    assert "1 wait" in examined.the("TTFT is queueing, not prefill").said


def test_first_tokens_that_are_late_for_reading() -> None:
    stage = CostlyStage(token_s=0.001)
    with live_node(stage) as node, ward(node.url, ended=1, ttft_s=0.3) as examined:
        assert node.complete("x" * 600, max_tokens=2).status == 200
    found = examined.the("TTFT is prefill, not queueing")
    assert "prompts of 600 tokens" in found.means


def test_a_batch_that_is_too_large_for_the_target() -> None:
    stage = CostlyStage(sequence_s=0.015)
    with live_node(stage) as node, ward(node.url, ended=8, tpot_s=0.04) as examined:
        assert {reply.status for reply in many(lambda: node.chat(max_tokens=30), 8)} == {200}
    found = examined.the("batch too large for the TPOT target")
    assert found.change.startswith("max_running_requests about ")
    advised = int(found.change.split()[2])
    assert 1 <= advised < 8


def test_more_places_are_not_advised_where_tokens_are_slow_already() -> None:
    stage = CostlyStage(sequence_s=0.02)
    with (
        live_node(stage, max_running_requests=4) as node,
        ward(node.url, ended=12, ttft_s=0.3, tpot_s=0.04) as examined,
    ):
        assert {reply.status for reply in many(lambda: node.chat(max_tokens=20), 12)} == {200}
    assert "batch too large for the TPOT target" in examined.names
    assert examined.the("TTFT is queueing, not prefill").change.startswith("another node")


def test_a_machine_that_is_too_slow_even_for_one() -> None:
    stage = CostlyStage(sequence_s=0.05)
    with live_node(stage) as node, ward(node.url, ended=1, tpot_s=0.02) as examined:
        assert node.chat(max_tokens=12).status == 200
    assert examined.names == ["too slow for the TPOT target, even alone"]


def test_long_prompts_that_stall_short_answers() -> None:
    stage = CostlyStage(token_s=0.0004)
    with (
        live_node(stage) as node,
        ward(node.url, ended=2, tpot_s=0.03) as examined,
        ThreadPoolExecutor(1) as pool,
    ):
        short = pool.submit(lambda: node.chat("hi", max_tokens=40))
        until(lambda: node.num_running > 0, "the short answer to begin")
        for number in range(1000):
            if short.done():
                break
            assert node.complete(f"{number:03}" * 300, max_tokens=1).status == 200
        assert short.result().status == 200
    found = examined.the("long prompts stall short ones")
    assert "max_num_batched_tokens" in found.change


def test_a_few_very_slow_steps_are_not_blamed_on_requests() -> None:
    stage = CostlyStage(tenth_s=1.0)
    with live_node(stage) as node, ward(node.url, ended=1, tpot_s=0.06) as examined:
        assert node.chat("hi", max_tokens=31).status == 200
    assert "kvota doctor" in examined.the("a few steps are very slow").change


def test_an_engine_that_is_stuck() -> None:
    with live_node(stuck_after_s=0.1) as node, node.stage.held(), ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: node.chat(max_tokens=2))
        node.stage.gate.wait_for_step()
        with ward(node.url, stuck_after_s=0.5) as examined:
            pass
        node.stage.gate.open()
        assert call.result().status == 200
    assert examined.names == ["engine stuck"]
    assert "makes no progress" in examined.the("engine stuck").means


def test_an_engine_that_is_busy_is_not_stuck() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with live_node(stage) as node, busy(node, lambda: node.chat(max_tokens=LONG)):
        until(lambda: node.num_running == 1, "it to run")
        with ward(node.url, num_looks=2, stuck_after_s=0.0) as examined:
            begun = len(node.stage.plans)
            until(lambda: len(node.stage.plans) > begun + 2, "some steps")
    assert examined.names == []
    assert examined.found.verdict.startswith("No problem")


def test_steps_that_fail() -> None:
    with live_node() as node, ward(node.url) as examined:
        node.stage.poison = frozenset({7})
        assert node.complete([7, 8, 9], max_tokens=2).status >= 500
    assert "steps fail" in examined.names


def test_memory_that_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_node() as node, monkeypatch.context() as patch:
        patch.setattr(KVCache, "release", lambda self, table: None)
        with ward(node.url, ended=3, num_looks=4) as examined:
            for _ in range(3):
                assert node.chat(max_tokens=4).status == 200
            until(lambda: node.num_open == 0, "all to have ended")
    found = examined.the("KV only rises: leak")
    assert "blocks belong to requests that have ended" in found.said
    assert examined.found.verdict.startswith("KV only rises: leak.")


def test_a_process_that_grows() -> None:
    """The node lives in this process, which takes more memory before each further look."""
    held: list[bytes] = []
    with live_node() as node, Patient(node.url, None) as patient:
        return_free_memory()  # of tests before, or it would be given back between the looks
        readings = [patient.read(with_usage=True)]
        for _ in range(2):
            held.append(b"x" * (GROWTH_BYTES * 8 // 10))
            readings.append(patient.read(with_usage=True))
    found = diagnose(Window(readings), Targets()).findings
    grown = next(one for one in found if one.name == "the process grows")
    assert grown.level is Level.NOTE
    assert "kvota bench soak" in grown.change
    assert len(held) == 2


def test_memory_that_is_taken_and_given_again() -> None:
    stage = Stage(num_blocks=16)
    with live_node(stage, admission="optimistic") as node, ward(node.url, ended=6) as examined:
        replies = many(lambda: node.complete("hi", max_tokens=120, ignore_eos=True), 6)
        assert {reply.status for reply in replies} == {200}
    found = examined.the("preemption thrash")
    assert "reserve" in found.change
    assert "tokens were computed twice" in found.said


def test_readers_that_do_not_read() -> None:
    heavy = {"n": 2, "max_tokens": LONG, "logprobs": True, "top_logprobs": 20, "stream": True}
    with (
        live_node(Stage(num_blocks=1024), send_timeout_s=0.2) as node,
        ward(node.url, ended=1) as examined,
    ):
        node.take_little()
        with RawConnection(node.port, receive_bytes=4096) as raw:
            raw.send(post_bytes(CHAT, node.chat_body("hi") | heavy))
            until(lambda: '"outcome": "slow_reader"' in node.log, "it to be cut")
    found = examined.the("slow readers")
    assert found.said.startswith("1 of 1 answers cut")
    assert "send_timeout_s" in found.change


def test_clients_that_give_up() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with live_node(stage) as node, ward(node.url, ended=6) as examined:
        for _ in range(6):
            with node.stream(CHAT, node.chat_body("hi", max_tokens=LONG)) as stream:
                stream.next_chunk()
    assert examined.the("clients give up").said.startswith("6 of 6")


def test_a_prefix_cache_that_is_off() -> None:
    with live_node(prefix_cache=False) as node, ward(node.url, ended=8) as examined:
        for _ in range(8):
            assert node.complete("the same words " * 60, max_tokens=1).status == 200
    assert examined.names == ["prefix cache off"]
    assert examined.the("prefix cache off").level is Level.NOTE
    assert "Worth knowing: prefix cache off" in examined.found.verdict


def test_a_prefix_cache_that_finds_nothing() -> None:
    with live_node(Stage(num_blocks=1024)) as node, ward(node.url, ended=8) as examined:
        for letter in "abcdefgh":
            assert node.complete(letter * 600, max_tokens=1).status == 200
    assert "first in the prompt" in examined.the("prefix cache useless").change


def test_a_prefix_cache_that_works_gets_no_word() -> None:
    with live_node() as node, ward(node.url, ended=8) as examined:
        for _ in range(8):
            assert node.complete("the same words " * 60, max_tokens=1).status == 200
    assert examined.names == []


def test_far_more_load_than_answers_is_noted_even_where_nobody_has_a_name() -> None:
    stage = Stage()
    stage.step_s = SLOW_S
    with (
        live_node(stage, max_running_requests=1, max_waiting_queue=0) as node,
        busy(node, lambda: node.chat(max_tokens=LONG)),
        ward(node.url, ended=25) as examined,
    ):
        until(lambda: node.num_running == 1, "one to run")
        assert {node.chat(max_tokens=2).status for _ in range(25)} == {503}
    assert examined.the("retry storm, or far too much load").said.startswith("25 refusals")


def test_a_server_that_goes_away_while_it_is_watched() -> None:
    node = LiveNode()
    num_sleeps = count(1)

    def sleep(_: float) -> None:
        if next(num_sleeps) == 2:
            node.stop()

    ticks = iter(range(100))  # a watch of five looks, however long each of them takes
    with Patient(node.url, None) as patient:
        window = watch(patient, 5.0, 1.0, sleep=sleep, clock=lambda: float(next(ticks)))
    found = diagnose(window, Targets()).findings[0]
    assert found.name == "server does not answer"
    assert found.said.startswith("Cannot talk to")

from typing import Any

from kvota.tools.top import words
from kvota.tools.top.carpark import Blocks
from kvota.tools.top.samples import Samples
from kvota.tools.top.scene import NUM_SPEEDS_MAX, Scene, Watch
from kvota.tools.top.server import Reading
from kvota.wire.requests import LiveRequest
from tests.support.watched_server import live, queued, reading


def seen(watch: Watch, now_s: float, *requests: Any, **facts: Any) -> Scene:
    return watch.see(reading(*requests, **facts), now_s, unix_s=1000.0)


def test_a_scene_tells_what_the_page_tells() -> None:
    scene = seen(
        Watch(), 0.0, used=5, cached=3, free=2, running=4, waiting=7, preemptions=2,
        refused={"queue_timeout": 1, "queue_full": 9, "draining": 0}, started_s=400.0,
        not_ready="It loads.",
    )  # fmt: skip
    assert (scene.model, scene.not_ready, scene.uptime_s) == ("tiny", "It loads.", 600.0)
    assert (scene.num_running, scene.num_waiting, scene.num_preemptions) == (5, 7, 2)
    assert list(scene.refusals.items()) == [("queue_full", 9), ("queue_timeout", 1)]
    assert scene.blocks == Blocks(5, 3, 2)


def test_speed_is_tokens_between_two_readings() -> None:
    watch = Watch()
    assert seen(watch, 10.0, tokens=100).speed is None
    assert seen(watch, 12.0, tokens=150).speed == 25.0
    assert seen(watch, 13.0, tokens=150).speeds == (25.0, 0.0)


def test_a_server_that_was_started_again_begins_anew() -> None:
    watch = Watch()
    for now_s, tokens in ((0.0, 0), (1.0, 500), (2.0, 3), (3.0, 13)):
        scene = seen(watch, now_s, tokens=tokens)
    assert scene.speeds == (10.0,)


def test_a_gap_is_not_shown_as_a_speed() -> None:
    watch = Watch()
    seen(watch, 0.0, tokens=0)
    watch.lose()
    assert seen(watch, 60.0, tokens=600).speeds == ()
    assert seen(watch, 61.0, tokens=605).speeds == (5.0,)


def test_only_so_many_speeds_are_kept() -> None:
    watch = Watch()
    for second in range(NUM_SPEEDS_MAX + 10):
        scene = seen(watch, float(second), tokens=second)
    assert len(scene.speeds) == NUM_SPEEDS_MAX


def test_who_runs_comes_oldest_first_and_who_waits_by_position() -> None:
    young, old = live("young", age_s=1.0), live("old", age_s=9.0)
    paused = live("paused", phase="paused", position=1, kv_blocks=0)
    scene = seen(Watch(), 0.0, queued("c", 3), young, queued("b", 2), old, paused)
    assert [request.id for request in scene.requests] == ["old", "young", "paused", "b", "c"]
    assert [request.id for request in scene.line] == ["paused", "b", "c"]


def test_letters_go_to_those_who_hold_blocks_and_stay() -> None:
    watch = Watch()
    scene = seen(watch, 0.0, live("a", kv_blocks=4), live("b", kv_blocks=0), queued("c", 1))
    assert scene.letters == {"a": "A"}
    assert scene.holdings == [("A", 4)]
    scene = seen(watch, 1.0, live("b", kv_blocks=2, age_s=5), live("a", kv_blocks=4))
    assert scene.holdings == [("B", 2), ("A", 4)]


def at_gateway(*requests: Any, ended: int = 0, **facts: float) -> Reading:
    """What a gateway says that has only foreign engines behind it."""
    lines = [
        f'kvota_gateway_output_tokens_total{{model="chat"}} {ended}',
        'kvota_gateway_rejected_total{code="queue_full"} 2',
        'kvota_gateway_backend_kv_usage_ratio{backend="gpu-1"} 0.25',
        'kvota_gateway_backend_kv_usage_ratio{backend="gpu-2"} 0.5',
        "kvota_gateway_process_start_time_seconds 400",
    ]
    return Reading(requests, Samples.parse("\n".join([*lines, ""])))


def foreign(id_: str, **fields: Any) -> LiveRequest:
    return live(id_, backend="gpu-1", kv_blocks=0, **fields)


def test_a_gateway_without_a_node_shows_its_requests_and_what_share_of_memory_is_in_use() -> None:
    line = queued("b", 1, model="other", kv_blocks=0)
    scene = Watch().see(at_gateway(foreign("a"), line), 0.0, unix_s=1000.0)
    assert (scene.num_running, scene.num_waiting) == (1, 1)
    assert scene.model == "other, tiny"
    assert scene.uptime_s == 600.0
    assert scene.refusals == {"queue_full": 2}
    assert scene.blocks.total == 0
    assert scene.letters == {}
    assert words.memory(scene) == "gpu-1 25% · gpu-2 50%"


def test_the_speed_of_a_gateway_counts_tokens_of_requests_that_run() -> None:
    watch, speeds = Watch(), []
    for now_s, read in enumerate(
        [
            at_gateway(foreign("a", output_tokens=100)),
            at_gateway(foreign("a", output_tokens=150)),
            at_gateway(foreign("a", output_tokens=160), ended=160),  # it ended between two looks
            at_gateway(ended=180),
            at_gateway(ended=1),  # started again
            at_gateway(ended=11),
        ]
    ):
        speeds.append(watch.see(read, float(now_s), unix_s=0.0).speed)
    assert speeds == [None, 50.0, 170.0, 0.0, None, 10.0]

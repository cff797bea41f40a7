"""Several engine requests are one: together or not at all, and read to the end."""

from dataclasses import replace

import pytest

from kvota.core.errors import BackendFailed, ClientClosed, Outcome, Refusal, Refused
from kvota.core.request import Delta, FinishReason, PromptRead, Request, SamplingParams
from kvota.node.generation import Generation
from tests.support.http import ScriptedRunner, delta, ended, fails, read, says


def request(name: str, n: int = 1) -> Request:
    return Request(id=name, prompt=[3], max_tokens=9, sampling=SamplingParams(), arrived_s=0.0, n=n)


Seen = dict[int, list[PromptRead | Delta]]


async def collect(generation: Generation, seen: Seen) -> Seen:
    async for index, events in generation.events():
        seen.setdefault(index, []).extend(events)
    return seen


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_events_come_in_order_for_each_prompt_and_add_up(num_requests: int) -> None:
    runner = ScriptedRunner(says("a", "b", "c", cached=2))
    generation = Generation.submit(runner, [request(str(i)) for i in range(num_requests)])
    seen = await collect(generation, {})
    assert sorted(seen) == list(range(num_requests))
    for events in seen.values():
        assert isinstance(events[0], PromptRead)
        assert [e.text for e in events if isinstance(e, Delta)] == ["a", "b", "c"]
    tally = generation.tally
    assert (tally.output_tokens, tally.cached_tokens) == (3 * num_requests, 2 * num_requests)
    assert (tally.queued_s, tally.first_token_s, tally.total_s) == (0.25, 0.5, 1.5)
    assert tally.time_per_output_token_s == pytest.approx((1.5 - 0.5) / 2)
    assert tally.kv_block_s == 4.0 * num_requests
    assert generation.outcome is Outcome.COMPLETED


async def test_time_per_token_is_that_of_the_longest_choice_and_absent_for_one_token() -> None:
    generation = Generation.submit(ScriptedRunner(says("a")), [request("a", n=4)])
    await collect(generation, {})
    assert generation.tally.time_per_output_token_s is None


async def test_time_per_token_does_not_count_what_other_prompts_waited() -> None:
    runner = ScriptedRunner()
    generation = Generation.submit(runner, [request("a"), request("b")])
    for stream, first_s, last_s in zip(runner.streams, (0.5, 10.0), (1.5, 14.0), strict=True):
        for _ in range(5):
            stream.push(delta(stream.request, "x"))
        whole = replace(ended(stream.request, output=5), first_token_s=first_s, total_s=last_s)
        stream.push(whole)
    await collect(generation, {})
    tally = generation.tally
    assert (tally.first_token_s, tally.total_s, tally.decode_s) == (0.5, 14.0, 13.5)
    assert tally.time_per_output_token_s == (14.0 - 10.0) / 4  # of the slower of the two


async def test_the_first_failure_is_raised_after_all_have_ended() -> None:
    runner = ScriptedRunner()
    generation = Generation.submit(runner, [request("a"), request("b")])
    first, second = runner.streams
    first.push(read(first.request), delta(first.request, "x"))
    error = BackendFailed("It broke.")
    second.push(ended(second.request, outcome=Outcome.ENGINE_ERROR, error=error))
    with pytest.raises(BackendFailed):
        await collect(generation, {})
    assert first.is_cancelled
    assert first.is_read_to_end
    assert generation.outcome is Outcome.ENGINE_ERROR


async def test_what_came_before_a_failure_is_still_told() -> None:
    error = BackendFailed("It broke.")
    runner = ScriptedRunner(fails(error, Outcome.ENGINE_ERROR, "a"))
    generation = Generation.submit(runner, [request("a")])
    seen: Seen = {}
    with pytest.raises(BackendFailed):
        await collect(generation, seen)
    assert [event.text for event in seen[0] if isinstance(event, Delta)] == ["a"]


async def test_cancelling_ends_with_the_client_being_gone() -> None:
    runner = ScriptedRunner()
    generation = Generation.submit(runner, [request("a"), request("b")])
    generation.cancel()
    generation.cancel()
    with pytest.raises(ClientClosed):
        await collect(generation, {})
    assert generation.outcome is Outcome.CLIENT_CLOSED


async def test_cancelling_what_is_complete_changes_nothing() -> None:
    runner = ScriptedRunner()
    generation = Generation.submit(runner, [request("a")])
    [stream] = runner.streams
    stream.push(read(stream.request), delta(stream.request, "a", finish=FinishReason.STOP))
    stream.push(ended(stream.request, output=1))
    generation.cancel()
    await collect(generation, {})
    assert generation.outcome is Outcome.COMPLETED


async def test_a_refusal_takes_back_what_was_accepted() -> None:
    runner = ScriptedRunner()
    runner.refusal, runner.room = Refused(Refusal.QUEUE_FULL, "Full.", retry_after_s=1), 1
    with pytest.raises(Refused):
        Generation.submit(runner, [request("a"), request("b")])
    assert [stream.is_cancelled for stream in runner.streams] == [True]

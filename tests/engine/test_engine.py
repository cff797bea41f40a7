import dataclasses

import pytest

from kvota.core.errors import (
    BackendFailed,
    ClientClosed,
    InvalidRequest,
    KvotaError,
    Outcome,
    Refusal,
    Refused,
    RequestTimeout,
)
from kvota.core.plan import Draw, Executor, Sampled, StepPlan, StepResult
from kvota.core.request import FinishReason, Paused, SamplingParams
from kvota.engine.engine import FAILED_STEPS_MAX, EngineBroken
from kvota.engine.lateness import not_begun
from kvota.engine.mailbox import Drain, Look, Pause, RequestState, Resume, Shutdown
from kvota.engine.text import Vocabulary
from tests.support.engine_world import EngineWorld
from tests.support.kv_executor import HashingExecutor, reference_tokens, repeating_token
from tests.support.scripted import ScriptedExecutor, say

EOS = 99


def stopping(*stops: int, **fields: object) -> SamplingParams:
    return dataclasses.replace(SamplingParams(stop_token_ids=frozenset(stops)), **fields)  # type: ignore[arg-type]


def scripted(*tokens: int, then: int = 0, pieces: list[bytes] | None = None) -> EngineWorld:
    letters = [bytes([97 + token]) for token in range(26)]
    return EngineWorld(
        ScriptedExecutor(say(*tokens, then=then)), vocabulary=Vocabulary(pieces or letters)
    )


# --- answers -------------------------------------------------------------------------------------


def test_a_request_runs_to_its_limit_and_ends_once() -> None:
    world = EngineWorld()
    request = world.submit("a", max_tokens=20)
    world.run()
    assert world.tokens("a") == reference_tokens(request, 0)
    ended = world.ended("a")
    assert (ended.outcome, ended.error) == (Outcome.COMPLETED, None)
    assert (ended.prompt_tokens, ended.output_tokens) == (3, 20)
    assert world.deltas("a")[-1].finish is FinishReason.LENGTH
    assert world.num_blocks_used == 0


def test_many_at_once_get_what_each_gets_alone() -> None:
    world = EngineWorld(HashingExecutor(24, 4), max_num_batched_tokens=32, min_run_tokens=2)
    requests = [
        world.submit(f"r{i}", prompt=range(1 + i % 3, 9 + i), max_tokens=15, n=1 + i % 3)
        for i in range(12)
    ]
    world.run()
    for request in requests:
        for choice in range(request.n):
            assert world.tokens(request.id, choice) == reference_tokens(request, choice)
        assert world.ended(request.id).output_tokens == 15 * request.n
    assert world.scheduler.snapshot().preemptions > 0, "the pool was meant to be too small"
    assert world.num_blocks_used == 0


def test_a_preempted_request_shows_nothing_twice_and_says_how_often() -> None:
    world = EngineWorld(HashingExecutor(7, 8), min_run_tokens=1)
    requests = [
        world.submit(name, prompt=range(first, first + 18), max_tokens=20)
        for name, first in (("a", 0), ("b", 50))
    ]
    world.run()
    ended = [world.ended(name) for name in "ab"]
    assert sum(end.num_preemptions for end in ended) >= 1
    for request, end in zip(requests, ended, strict=True):
        assert world.tokens(request.id) == reference_tokens(request, 0)
        assert (end.prompt_tokens, end.output_tokens) == (18, 20)


def test_the_end_token_ends_the_choice_and_is_not_shown() -> None:
    world = scripted(1, EOS, 2)
    world.submit("a", sampling=stopping(EOS))
    world.run()
    assert world.text("a") == "b"
    assert world.deltas("a")[-1].finish is FinishReason.STOP
    assert world.deltas("a")[-1].matched_stop == EOS
    assert world.ended("a").output_tokens == 2


def test_an_end_token_at_the_last_allowed_place_is_a_stop() -> None:
    world = scripted(1, 2, EOS)
    world.submit("a", sampling=stopping(EOS), max_tokens=3)
    world.run()
    assert world.deltas("a")[-1].finish is FinishReason.STOP


def test_no_stop_counts_before_min_tokens() -> None:
    world = scripted(1, EOS, 2, EOS)
    world.submit("a", sampling=stopping(EOS, min_tokens=3), stop=("b",))
    world.run()
    assert world.tokens("a") == [1, EOS, 2, EOS]


@pytest.mark.parametrize(
    ("include_stop", "skip_special", "expected"),
    [(False, False, "abc"), (True, False, "abcd"), (True, True, "abc")],
)
def test_a_stop_token_is_shown_when_stops_are_and_it_is_not_hidden(
    include_stop: bool, skip_special: bool, expected: str
) -> None:
    letters = [bytes([97 + token]) for token in range(26)]
    vocabulary = Vocabulary(letters, special_ids=frozenset({3}))
    world = EngineWorld(ScriptedExecutor(say(0, 1, 2, 3)), vocabulary=vocabulary)
    world.submit(
        "a", sampling=stopping(3), stop=("cx",),
        include_stop=include_stop, skip_special_tokens=skip_special,
    )  # fmt: skip
    world.run()
    assert world.text("a") == expected
    assert world.deltas("a")[-1].finish is FinishReason.STOP


def test_a_stop_string_ends_the_sequence_in_that_step() -> None:
    pieces = [b"x", b"say ", b"<<", b"EN", b"D>", b">"]
    world = scripted(1, 2, 3, 4, 5, then=0, pieces=pieces)
    world.submit("a", stop=("<<END>>",), max_tokens=50)
    world.run()
    assert world.text("a") == "say "
    assert world.ended("a").output_tokens == 5
    assert world.deltas("a")[-1].matched_stop == "<<END>>"


def test_nothing_but_the_prompt_can_be_asked_for() -> None:
    world = EngineWorld()
    world.submit("a", prompt=[1, 2, 3], max_tokens=0, prompt_logprobs=1)
    world.run()
    assert len(world.prompt_read("a").prompt_logprobs) == 2
    assert world.ended("a").output_tokens == 0
    assert world.deltas("a")[-1].finish is FinishReason.LENGTH


def test_a_repeated_prompt_is_found_in_the_cache() -> None:
    world = EngineWorld(HashingExecutor(16, 16))
    for name in ("cold", "again"):
        world.submit(name, prompt=range(40))
        world.run()
    assert world.prompt_read("cold").cached_tokens == 0
    assert world.prompt_read("again").cached_tokens == 32
    assert world.tokens("cold") == world.tokens("again")


# --- speculated tokens ---------------------------------------------------------------------------


def speculating() -> EngineWorld:
    return EngineWorld(HashingExecutor(64, 32, repeating_token), speculative_tokens=5)


def test_speculated_tokens_are_told_one_by_one_and_are_the_same() -> None:
    world = speculating()
    request = world.submit("a", prompt=(5, 5, 5), max_tokens=80, n=2)
    world.run()
    for choice in range(2):
        assert world.tokens("a", choice) == reference_tokens(request, choice, repeating_token)
    assert world.ended("a").output_tokens == 160
    assert isinstance(world.executor, HashingExecutor)
    assert world.executor.num_speculated_right > 20
    assert world.num_blocks_used == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_among_speculated_tokens_ends_there(n: int) -> None:
    for stop in range(7):
        for seed in range(4):
            sampling = stopping(stop, seed=seed, min_tokens=30)
            world = speculating()
            request = world.submit("a", prompt=(5, 5), max_tokens=80, n=n, sampling=sampling)
            world.run()
            for choice in range(n):
                whole = reference_tokens(request, choice, repeating_token)
                length = next((i + 1 for i in range(29, 80) if whole[i] == stop), 80)
                assert world.tokens("a", choice) == whole[:length]
            assert world.ended("a").outcome is Outcome.COMPLETED
            assert world.num_blocks_used == 0
            num_told = world.ended("a").output_tokens
            assert world.observer.totals["num_sampled"] == num_told, "counts what nobody got"


def test_logprobs_of_speculated_tokens_come_with_them() -> None:
    def told(speculative_tokens: int) -> list[object]:
        world = EngineWorld(
            HashingExecutor(64, 32, repeating_token), speculative_tokens=speculative_tokens
        )
        world.submit("a", prompt=(5, 5), max_tokens=60, sampling=SamplingParams(logprobs=0))
        world.run()
        return [delta.logprobs for delta in world.deltas("a")]

    assert told(5) == told(0)


def test_steps_are_observed_with_what_was_guessed() -> None:
    world = speculating()
    world.submit("a", prompt=(5, 5), max_tokens=60)
    world.run()
    assert isinstance(world.executor, HashingExecutor)
    observed = world.observer.totals
    assert observed["num_sampled"] == 60
    assert observed["num_prefilled"] == 2
    assert observed["num_speculated"] == world.executor.num_speculated > 0
    assert observed["num_speculated_right"] == world.executor.num_speculated_right > 0


def test_a_failed_step_with_guesses_is_repeated_in_parts() -> None:
    world = speculating()
    request = world.submit("a", prompt=(5, 5), max_tokens=60)
    assert isinstance(world.executor, HashingExecutor)
    while world.engine.has_work() or not world.events["a"]:
        world.executor.fail_next = world.executor.num_steps % 3 == 0
        world.step()
    assert world.tokens("a") == reference_tokens(request, 0, repeating_token)
    assert world.executor.num_speculated_right > 10


# --- times ---------------------------------------------------------------------------------------


def test_times_are_told_from_arrival() -> None:
    world = EngineWorld(max_num_batched_tokens=8)
    world.submit("a", prompt=range(20), arrived_s=99.0)
    world.run()
    ended = world.ended("a")
    assert world.prompt_read("a").queued_s == ended.queued_s == pytest.approx(1.0)
    assert ended.first_token_s == pytest.approx(1.02)
    assert ended.total_s == pytest.approx(1.09)


# --- endings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_gives_its_blocks_back_in_that_step(steps: int) -> None:
    world = EngineWorld(max_num_batched_tokens=8)
    world.submit("a", prompt=range(20), n=3)
    world.step(steps)
    world.cancel("a")
    world.step()
    assert world.num_blocks_used == 0
    assert world.engine.gauges.num_blocks_held_after_abort == 0
    assert world.ended("a").outcome is Outcome.CLIENT_CLOSED
    assert isinstance(world.ended("a").error, ClientClosed)
    events = len(world.events["a"])
    world.cancel("a")
    world.step(3)
    assert len(world.events["a"]) == events


def test_a_request_past_its_time_is_ended_with_what_it_has() -> None:
    world = EngineWorld()
    world.submit("a", max_tokens=100, deadline_s=100.045)
    world.submit("b", max_tokens=20)
    world.run()
    ended = world.ended("a")
    assert ended.outcome is Outcome.REQUEST_TIMEOUT
    assert isinstance(ended.error, RequestTimeout)
    assert 0 < ended.output_tokens < 8
    assert world.ended("b").outcome is Outcome.COMPLETED


def test_a_request_that_never_began_is_refused_when_its_wait_is_over() -> None:
    world = EngineWorld(max_running_requests=1)
    world.submit("a", max_tokens=30)
    world.submit("b", queue_deadline_s=100.05)
    world.run()
    error = world.ended("b").error
    assert isinstance(error, Refused)
    assert error.reason == "queue_timeout"
    assert error.message == not_begun(0.05, retry_after_s=0.05).message
    assert error.retry_after_s == pytest.approx(0.05)
    assert world.tokens("b") == []


def test_a_request_that_has_begun_is_not_bound_by_the_line_any_more() -> None:
    world = EngineWorld()
    world.submit("a", max_tokens=30, queue_deadline_s=100.05)
    world.run()
    assert world.ended("a").outcome is Outcome.COMPLETED


def test_draining_refuses_what_never_ran_and_finishes_what_runs() -> None:
    world = EngineWorld(max_running_requests=1)
    world.submit("a", max_tokens=5)
    world.submit("b")
    world.step(2)
    going = Refused(Refusal.DRAINING, "Going down.", retry_after_s=12.0)
    world.mailbox.post(Drain(going))
    world.run()
    assert world.ended("a").outcome is Outcome.COMPLETED
    assert (world.ended("b").outcome, world.ended("b").error) == (Outcome.REFUSED, going)


def test_shutdown_ends_everything_with_an_error() -> None:
    world = EngineWorld(max_running_requests=1)
    world.submit("a")
    world.submit("b")
    world.step(2)
    world.mailbox.post(Shutdown())
    world.step()
    for name in "ab":
        assert world.ended(name).outcome is Outcome.SHUTDOWN
        assert isinstance(world.ended(name).error, BackendFailed)
    assert world.num_blocks_used == 0


def test_a_paused_request_holds_nothing_and_goes_on_with_the_same_text() -> None:
    world = EngineWorld()
    request = world.submit("a", max_tokens=20, n=2)
    world.step(5)
    world.mailbox.post(Pause("a"))
    world.step(3)
    assert world.events["a"][-1] == Paused()
    assert world.num_blocks_used == 0
    world.mailbox.post(Resume("a"))
    world.run()
    for choice in range(2):
        assert world.tokens("a", choice) == reference_tokens(request, choice)


def test_pausing_who_has_ended_is_passed_over() -> None:
    world = EngineWorld()
    world.submit("a", max_tokens=1)
    world.run()
    for letter in (Pause("a"), Resume("a"), Pause("nobody")):
        world.mailbox.post(letter)
    world.step()
    world.ended("a")
    assert "nobody" not in world.events


def test_a_paused_request_can_be_cancelled_and_can_time_out() -> None:
    world = EngineWorld()
    world.submit("a", max_tokens=20)
    world.submit("b", max_tokens=20, deadline_s=100.06)
    world.step(2)
    for name in "ab":
        world.mailbox.post(Pause(name))
    world.step()
    world.cancel("a")
    world.run()
    assert world.ended("a").outcome is Outcome.CLIENT_CLOSED
    assert world.ended("b").outcome is Outcome.REQUEST_TIMEOUT


def test_looking_tells_how_far_everybody_is() -> None:
    world = EngineWorld(max_num_batched_tokens=8, max_running_requests=3)
    world.submit("two choices", prompt=range(10), n=2)
    world.submit("waiting", prompt=range(4), n=3)
    world.step(4)
    seen: list[RequestState] = []
    world.mailbox.post(Look(seen.extend))
    world.step()
    first, second = seen
    assert (first.request_id, first.is_prompt_read, first.output_tokens) == ("two choices", True, 6)
    assert first.computed_tokens == 2 * 12
    assert first.num_blocks == 4, "the blocks of the prompt count once"
    assert (second.request_id, second.is_running, second.num_blocks) == ("waiting", False, 0)


# --- failures ------------------------------------------------------------------------------------


def test_a_step_that_fails_once_changes_no_text() -> None:
    executor = HashingExecutor(64, 4)
    world = EngineWorld(executor)
    requests = [world.submit(name, prompt=range(6), n=2) for name in "abc"]
    for _ in range(4):
        world.step(2)
        executor.fail_next = True
    world.run()
    assert len(world.observer.failures) >= 3
    for request in requests:
        for choice in range(2):
            assert world.tokens(request.id, choice) == reference_tokens(request, choice)


class FailingDraws:
    """Every token of a request with a seed in `errors` fails with its error."""

    def __init__(self, errors: dict[int, KvotaError]) -> None:
        self._real = ScriptedExecutor(say(1, 2, 3))
        self._errors = errors
        self.capacity = self._real.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._real.execute(plan)
        return StepResult(
            [
                dataclasses.replace(done, sampled=list(map(self._fail, chunk.draws, done.sampled)))
                for chunk, done in zip(plan.chunks, result.chunks, strict=True)
            ]
        )

    def _fail(self, draw: Draw, sampled: Sampled) -> Sampled:
        error = self._errors.get(draw.params.seed)
        return sampled if error is None else Sampled(0, error=error)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("Its grammar is too complex."), Outcome.INVALID),
        (BackendFailed("The logits are not numbers."), Outcome.ENGINE_ERROR),
    ],
)
def test_a_draw_that_fails_ends_its_request_with_whose_fault_it_was(
    error: KvotaError, outcome: Outcome
) -> None:
    world = EngineWorld(FailingDraws({13: error}), vocabulary=Vocabulary([b"a", b"b", b"c", b"d"]))
    world.submit("bad", sampling=SamplingParams(seed=13))
    world.submit("good")
    world.run()
    assert (world.ended("bad").outcome, world.ended("bad").error) == (outcome, error)
    assert world.text("good") == "bcdaaaaa"


def test_a_request_that_breaks_the_model_ends_alone() -> None:
    poisoned = ScriptedExecutor(say(1, 2, 3), poison=frozenset({13}))
    world = EngineWorld(poisoned, vocabulary=Vocabulary([b"a", b"b", b"c", b"d"]))
    world.submit("good")
    world.submit("bad", prompt=[13, 1])
    world.submit("also good")
    world.run()
    assert world.ended("bad").outcome is Outcome.ENGINE_ERROR
    assert isinstance(world.ended("bad").error, BackendFailed)
    for name in ("good", "also good"):
        assert world.text(name) == "bcdaaaaa"
        assert world.ended(name).outcome is Outcome.COMPLETED
    world.submit("bad again", prompt=[13, 1])
    world.submit("later")
    world.run()
    assert world.ended("later").outcome is Outcome.COMPLETED


def test_a_request_that_breaks_the_model_and_is_sent_again_and_again_ends_nobody_else() -> None:
    """Clients repeat what failed, and on an idle node nothing else is computed in between."""
    world = EngineWorld(ScriptedExecutor(say(), poison=frozenset({13})))
    for attempt in range(3 * FAILED_STEPS_MAX):
        world.submit(f"r{attempt}", prompt=[1, 13])
        world.step()
        assert world.ended(f"r{attempt}").outcome is Outcome.ENGINE_ERROR
    assert world.num_blocks_used == 0
    world.submit("good")
    world.run()
    assert world.ended("good").outcome is Outcome.COMPLETED


def test_a_model_that_computes_nothing_any_more_ends_the_loop() -> None:
    executor = ScriptedExecutor(say())
    executor.faults = set(range(1, 100))
    world = EngineWorld(executor)
    for attempt in range(FAILED_STEPS_MAX - 1):
        world.submit(f"r{attempt}")
        world.step()
    world.submit("last")
    with pytest.raises(EngineBroken):
        world.step()
    assert world.ended("r0").outcome is Outcome.ENGINE_ERROR


class _Grammar:
    """Allows `count` tokens, then is complete; refuses token 5."""

    def __init__(self, count: int) -> None:
        self.left = count

    def write_mask(self, row: object) -> None:
        pass

    def accept(self, token: int) -> None:
        if token == 5:
            raise ValueError("5 is not a word")
        self.left -= 1

    def is_complete(self) -> bool:
        return self.left == 0


def test_a_complete_grammar_ends_the_choice() -> None:
    world = scripted(1, 2, 3, 4)
    world.submit("a", new_constraint=lambda: _Grammar(2))
    world.run()
    assert world.text("a") == "bc"
    assert world.deltas("a")[-1].finish is FinishReason.STOP


def test_a_grammar_that_breaks_ends_its_request_alone() -> None:
    world = scripted(1, 5, 2)
    world.submit("a", new_constraint=lambda: _Grammar(9), n=2)
    world.submit("b")
    world.run()
    assert world.ended("a").outcome is Outcome.ENGINE_ERROR
    assert world.ended("b").outcome is Outcome.COMPLETED
    assert world.num_blocks_used == 0


def test_every_choice_has_a_grammar_of_its_own() -> None:
    def by_choice(draw: Draw) -> int:
        return 1 + draw.choice

    executor: Executor = ScriptedExecutor(by_choice)
    world = EngineWorld(executor, vocabulary=Vocabulary([b"a", b"b", b"c"]))
    world.submit("a", new_constraint=lambda: _Grammar(3), n=2)
    world.run()
    assert [world.text("a", choice) for choice in (0, 1)] == ["bbb", "ccc"]


def test_without_a_prefix_cache_nothing_is_found_again() -> None:
    world = EngineWorld(HashingExecutor(16, 16), prefix_cache=False)
    for name in ("cold", "again"):
        world.submit(name, prompt=range(40))
        world.run()
    assert world.prompt_read("again").cached_tokens == 0
    assert world.tokens("cold") == world.tokens("again")

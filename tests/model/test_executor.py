"""The executor over real kernels: what a token computes depends on its own sequence alone.

A tiny model with random weights. On one machine the kernels give the same bits whatever the chunk
size, the neighbours, the blocks and the number of passes; TOLERANCE only leaves room for kernels
of other CPUs. With int8 inputs, one moved bit would show as more than that.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvota.core.plan import BlockCopy, Chunk, Draw, Sampled, StepPlan
from kvota.core.request import Request, SamplingParams, TokenLogprobs
from kvota.kv.cache import KVCache
from kvota.model import executor as executor_module
from kvota.model.compiled import Compiled, KvDtype, compile_model
from kvota.model.executor import OpenVinoExecutor
from kvota.model.graph import build_graph
from kvota.model.sampler import Sampler
from kvota.model.shapes import rounded_size
from kvota.model.source import open_source
from kvota.model.weights import WeightFormat
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from tests.support.tiny_models import fixed_tokens, tiny_architecture, write_safetensors

Floats = npt.NDArray[np.float32]

TOLERANCE = 1e-4
NUM_BLOCKS = 40
VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0.0)
TABLE = (7, 3, 11, 5, 20)
TOKENS = fixed_tokens(140, VOCAB_SIZE)


def compiled_tiny(
    folder: Path, weight_format: WeightFormat, *, mlp_size: int = 96, **settings: Any
) -> Compiled:
    """With 128 in place of 96 every product has whole blocks, and the model is turned."""
    architecture = tiny_architecture("llama", mlp_size=mlp_size)
    source = open_source(write_safetensors(folder, architecture=architecture).path)
    return compile_model(build_graph(source, weight_format), **settings)


@pytest.fixture(scope="module", params=["f32", "auto", "auto_u8", "turned", "int4"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    weight_format, kv_dtype = {
        "f32": (WeightFormat.F32, KvDtype.F32),
        "auto": (WeightFormat.AUTO, KvDtype.F16),
        "auto_u8": (WeightFormat.AUTO, KvDtype.U8),
        "turned": (WeightFormat.AUTO, KvDtype.F16),
        "int4": (WeightFormat.INT4, KvDtype.F16),
    }[request.param]
    mlp_size = 128 if request.param == "turned" else 96
    folder = tmp_path_factory.mktemp("tiny")
    return compiled_tiny(folder, weight_format, mlp_size=mlp_size, kv_dtype=kv_dtype)


@pytest.fixture
def executor(compiled: Compiled) -> OpenVinoExecutor:
    return compiled.executor(NUM_BLOCKS, Sampler(VOCAB_SIZE))


def read(
    executor: OpenVinoExecutor, tokens: Sequence[int], chunk_max: int, table: Sequence[int] = TABLE
) -> Floats:
    """Read `tokens` as a prompt in chunks of at most `chunk_max`; logits of every position."""
    rows = []
    for start in range(0, len(tokens), chunk_max):
        part = tokens[start : start + chunk_max]
        chunk = Chunk(0, part, start, table, prompt_logprobs=0, next_token=0)
        rows.append(executor.logits([chunk]))
    return np.concatenate(rows)


def decode_chunk(
    tokens: Sequence[int], num_prompt: int, table: Sequence[int], sequence_id: int = 0
) -> Chunk:
    """The step that computes the last of `tokens`, which was generated, and draws the next."""
    draw = Draw(GREEDY, 0, tokens, num_prompt)
    return Chunk(sequence_id, tokens[-1:], len(tokens) - 1, table, draws=(draw,))


def decoded(executor: OpenVinoExecutor, tokens: Sequence[int], num_prompt: int) -> Floats:
    """Logits after each token from `num_prompt` on, one token a step, alone; the prompt is read."""
    rows = [
        executor.logits([decode_chunk(tokens[:end], num_prompt, TABLE)])
        for end in range(num_prompt + 1, len(tokens) + 1)
    ]
    return np.concatenate(rows)


def assert_same(got: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


class TestATokenComputesTheSame:
    @pytest.mark.parametrize("chunk_max", [1, 2, 3, 32, 33, 139])
    def test_in_chunks_of_any_size(self, executor: OpenVinoExecutor, chunk_max: int) -> None:
        whole = read(executor, TOKENS, len(TOKENS))
        assert np.ptp(whole) > 1.0, "logits that do not spread prove nothing"
        assert_same(read(executor, TOKENS, chunk_max), whole)

    def test_after_a_prefix_hit_that_leaves_one_token(self, executor: OpenVinoExecutor) -> None:
        whole = read(executor, TOKENS[:65], 65)
        chunk = Chunk(1, TOKENS[64:65], 64, (7, 3, 30), prompt_logprobs=0, next_token=0)
        assert_same(executor.logits([chunk]), whole[64:])

    def test_in_any_blocks(self, executor: OpenVinoExecutor) -> None:
        expected = read(executor, TOKENS, 50)
        assert_same(read(executor, TOKENS, 50, (39, 0, 38, 1, 37)), expected)

    @pytest.mark.parametrize("num_neighbours", [1, 2, 6, 15, 34])
    def test_beside_others_that_decode(
        self, executor: OpenVinoExecutor, num_neighbours: int
    ) -> None:
        read(executor, TOKENS[:40], 40, (39, 38))
        chunk = decode_chunk(TOKENS[:41], 40, (39, 38))
        alone = executor.logits([chunk])
        others = [
            decode_chunk(TOKENS[i : i + 9], 1, (i,), sequence_id=i + 1)
            for i in range(num_neighbours)
        ]
        first = executor.logits([chunk, *others])[:1]
        last = executor.logits([*others, chunk])[-1:]
        assert_same(first, alone)
        assert_same(last, alone)

    def test_beside_another_that_reads_its_prompt(self, executor: OpenVinoExecutor) -> None:
        read(executor, TOKENS[:40], 40, (39, 38))
        chunk = decode_chunk(TOKENS[:41], 40, (39, 38))
        alone = executor.logits([chunk])
        assert_same(executor.logits([Chunk(1, TOKENS[:100], 0, (1, 2, 3, 4)), chunk]), alone)

    def test_in_a_pass_with_more_padding_than_a_block_has_room_for(
        self, executor: OpenVinoExecutor
    ) -> None:
        read(executor, TOKENS[:40], 40, (39, 38))
        chunk = decode_chunk(TOKENS[:41], 40, (39, 38))
        alone = executor.logits([chunk])
        others = [Chunk(i + 1, TOKENS[:110], 0, (1, 2, 3, 4)) for i in range(20)]
        assert rounded_size(2201) - 2201 > 32
        assert_same(executor.logits([*others, chunk]), alone)

    def test_computed_again_after_a_preemption(self, executor: OpenVinoExecutor) -> None:
        read(executor, TOKENS[:50], 50)
        steps = decoded(executor, TOKENS[:90], 50)
        draw = Draw(GREEDY, 0, TOKENS[:90], 50)
        table = (8, 9, 10)
        read(executor, TOKENS[:32], 32, table)
        again = Chunk(0, TOKENS[32:90], 32, table, draws=(draw,))
        token = executor.execute(StepPlan([again])).chunks[0].sampled[0].token
        assert token == int(steps[-1].argmax())
        following = decode_chunk(TOKENS[:91], 50, table)
        assert_same(executor.logits([following]), decoded(executor, TOKENS[:91], 50)[-1:])

    def test_in_a_fork_before_and_after_it_diverges(self, executor: OpenVinoExecutor) -> None:
        read(executor, TOKENS[:40], 40)
        first, second = [*TOKENS[:40], 5], [*TOKENS[:40], 9]
        expected = executor.logits([decode_chunk(second, 40, TABLE)])
        fork = (TABLE[0], 30)
        draw_both = [decode_chunk(first, 40, TABLE), decode_chunk(second, 40, fork, 1)]
        executor.execute(StepPlan(draw_both, copies=[BlockCopy(TABLE[1], 30)]))
        assert_same(executor.logits([draw_both[1]]), expected)
        after = [
            decode_chunk([*tokens, 7], 40, t) for tokens, t in ((first, TABLE), (second, fork))
        ]
        assert np.abs(np.diff(executor.logits(after), axis=0)).max() > 0.01


class TestSpeculatedTokens:
    def test_leave_the_logits_that_decoding_one_by_one_has(
        self, executor: OpenVinoExecutor
    ) -> None:
        read(executor, TOKENS[:64], 64)
        expected = decoded(executor, TOKENS[:75], 64)
        read(executor, TOKENS[:64], 64)
        chunk = replace(decode_chunk(TOKENS[:65], 64, TABLE), speculated=tuple(TOKENS[65:75]))
        neighbour = decode_chunk(TOKENS[:20], 10, (30,), sequence_id=1)
        assert_same(executor.logits([chunk, neighbour])[:11], expected)

    def test_are_kept_as_far_as_they_are_drawn(self, executor: OpenVinoExecutor) -> None:
        said = continued(executor, TOKENS[:40], 12)
        for num_right in range(6):
            guesses = [*said[1 : 1 + num_right], said[1 + num_right] ^ 1, *said[:2]]
            read(executor, TOKENS[:40], 40)
            chunk = decode_chunk([*TOKENS[:40], said[0]], 40, TABLE)
            plan = StepPlan([replace(chunk, speculated=tuple(guesses))])
            [answer] = executor.execute(plan).chunks
            assert [one.token for one in answer.sampled] == said[1 : 2 + num_right]
            after = continued(executor, [*TOKENS[:40], *said[: 2 + num_right]], 3, num_prompt=40)
            assert after == said[2 + num_right : 5 + num_right]

    def test_change_nothing_that_is_drawn(self, compiled: Compiled) -> None:
        plain = [told(compiled, params, 0) for params in EVERY_WAY_TO_DRAW]
        guessing = [told(compiled, params, 6) for params in EVERY_WAY_TO_DRAW]
        assert [sampled for sampled, _ in guessing] == [sampled for sampled, _ in plain]
        assert sum(num_steps for _, num_steps in guessing) < sum(steps for _, steps in plain)


FEW = dict.fromkeys(range(4), 100.0)  # of so few tokens, pairs come again
EVERY_WAY_TO_DRAW = [
    SamplingParams(temperature=0.0, logit_bias=FEW),
    SamplingParams(temperature=0.0, logit_bias=FEW, logprobs=3),
    SamplingParams(temperature=0.1, logit_bias=FEW, seed=3),
    SamplingParams(temperature=1.0, logit_bias=FEW, top_p=0.5, seed=4),
    SamplingParams(temperature=0.0, logit_bias=FEW, frequency_penalty=0.1),
    SamplingParams(temperature=0.0, logit_bias=FEW, min_tokens=30, stop_token_ids=frozenset({2})),
]


def continued(
    executor: OpenVinoExecutor, tokens: Sequence[int], count: int, num_prompt: int | None = None
) -> list[int]:
    """`count` greedy tokens after `tokens`, of which nothing or all but the last is in KV."""
    so_far = list(tokens)
    if num_prompt is None:
        num_prompt = len(so_far)
        so_far.append(int(read(executor, so_far, len(so_far))[-1].argmax()))
    while len(so_far) < len(tokens) + count:
        chunk = decode_chunk(so_far, num_prompt, TABLE)
        so_far.append(int(executor.logits([chunk])[0].argmax()))
    return so_far[len(tokens) :]


def told(
    compiled: Compiled, params: SamplingParams, speculative_tokens: int
) -> tuple[list[Sampled], int]:
    """All that is drawn for two requests at once, and in how many steps."""
    executor = compiled.executor(NUM_BLOCKS, Sampler(VOCAB_SIZE))
    cache = KVCache(NUM_BLOCKS, compiled.block_size)
    scheduler = Scheduler(cache, SchedulerLimits(speculative_tokens=speculative_tokens))
    for number in range(2):
        prompt = TOKENS[number : 9 + number] * 3
        scheduler.add(
            Request(id=str(number), prompt=prompt, max_tokens=40, sampling=params, arrived_s=0.0)
        )
    drawn: dict[int, list[Sampled]] = {}
    num_steps = 0
    while plan := scheduler.plan(0.0):
        num_steps += 1
        for sequence, sampled in scheduler.commit(plan, executor.execute(plan)).sampled:
            drawn.setdefault(sequence.id, []).append(sampled)
            if len(drawn[sequence.id]) == 40:
                scheduler.finish(sequence)
        scheduler.check()
    return [one for sequence_id in sorted(drawn) for one in drawn[sequence_id]], num_steps


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("exact")
    return compiled_tiny(folder, WeightFormat.F32, kv_dtype=KvDtype.F32)


class RecordingSampler:
    """Answers with row numbers of a known kind, and keeps what it was given."""

    def __init__(self) -> None:
        self.rows: list[Floats] = []
        self.num_prompt_rows: list[int] = []

    def sample(self, logits: Floats, draws: Sequence[Draw]) -> list[Sampled]:
        assert len(logits) == len(draws)
        self.rows.append(logits.copy())
        return [Sampled(draw.choice) for draw in draws]

    def prompt_logprobs(
        self, logits: Floats, next_tokens: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        assert len(logits) == len(next_tokens)
        self.num_prompt_rows.append(len(logits))
        pairs = zip(next_tokens, logits, strict=True)
        return [TokenLogprobs(token, float(row[token])) for token, row in pairs]


class TestAnswers:
    @pytest.fixture
    def sampler(self) -> RecordingSampler:
        return RecordingSampler()

    @pytest.fixture
    def recorded(self, exact: Compiled, sampler: RecordingSampler) -> OpenVinoExecutor:
        return exact.executor(NUM_BLOCKS, sampler)

    def test_come_in_the_order_of_the_plan(
        self, recorded: OpenVinoExecutor, sampler: RecordingSampler
    ) -> None:
        draws = tuple(Draw(GREEDY, choice, TOKENS[:9], 9) for choice in (4, 2))
        chunks = [
            Chunk(0, TOKENS[:9], 0, (0,), draws=draws),
            Chunk(1, TOKENS[:40], 0, (1, 2)),
            Chunk(2, TOKENS[:3], 0, (3,), draws=(Draw(GREEDY, 6, TOKENS[:3], 3),)),
        ]
        results = recorded.execute(StepPlan(chunks)).chunks
        assert [[s.token for s in result.sampled] for result in results] == [[4, 2], [], [6]]
        whole = read(recorded, TOKENS[:9], 9)
        assert_same(sampler.rows[0], whole[[8, 8, 2]])

    def test_a_step_without_draws_has_empty_results(self, recorded: OpenVinoExecutor) -> None:
        results = recorded.execute(StepPlan([Chunk(0, TOKENS[:5], 0, (0,))])).chunks
        assert [(list(r.sampled), list(r.prompt_logprobs)) for r in results] == [([], [])]

    def test_an_empty_plan_only_copies(self, recorded: OpenVinoExecutor) -> None:
        expected = read(recorded, TOKENS[:20], 20, (4,))[19:]
        assert recorded.execute(StepPlan([], copies=[BlockCopy(4, 6)])).chunks == []
        last = Chunk(0, TOKENS[19:20], 19, (6,), prompt_logprobs=0, next_token=0)
        assert_same(recorded.logits([last]), expected)

    def test_prompt_logprobs_are_of_the_tokens_that_follow(
        self, recorded: OpenVinoExecutor
    ) -> None:
        rows = read(recorded, TOKENS[:6], 6)
        cut = Chunk(0, TOKENS[:4], 0, (0,), prompt_logprobs=2, next_token=TOKENS[4])
        end = Chunk(0, TOKENS[4:6], 4, (0,), (Draw(GREEDY, 3, TOKENS[:6], 6),), prompt_logprobs=2)
        first = recorded.execute(StepPlan([cut])).chunks[0]
        second = recorded.execute(StepPlan([end])).chunks[0]
        answers = [*first.prompt_logprobs, *second.prompt_logprobs]
        assert [answer.token for answer in answers] == TOKENS[1:6]
        expected = [rows[i][TOKENS[i + 1]] for i in range(5)]
        np.testing.assert_allclose([a.logprob for a in answers], expected, atol=TOLERANCE)
        assert [s.token for s in second.sampled] == [3]

    def test_a_last_chunk_of_one_token_has_no_prompt_logprobs(
        self, recorded: OpenVinoExecutor
    ) -> None:
        chunk = Chunk(0, TOKENS[:1], 0, (0,), (Draw(GREEDY, 3, TOKENS[:1], 1),), prompt_logprobs=0)
        result = recorded.execute(StepPlan([chunk])).chunks[0]
        assert ([s.token for s in result.sampled], list(result.prompt_logprobs)) == ([3], [])

    def test_many_prompt_logprobs_take_several_passes_of_bounded_size(
        self, exact: Compiled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = TOKENS[:100]
        draw = Draw(GREEDY, 1, tokens, 100)
        chunk = Chunk(0, tokens, 0, TABLE, (draw,), prompt_logprobs=0)
        answers = []
        for rows_max in (1000, 7):
            bytes_max = rows_max * VOCAB_SIZE * 4
            monkeypatch.setattr(executor_module, "PROMPT_LOGITS_BYTES_MAX", bytes_max)
            sampler = RecordingSampler()
            result = exact.executor(NUM_BLOCKS, sampler).execute(StepPlan([chunk])).chunks[0]
            assert max(sampler.num_prompt_rows) <= rows_max
            assert [s.token for s in result.sampled] == [1]
            answers.append([(a.token, a.logprob) for a in result.prompt_logprobs])
        assert len(answers[0]) == 99
        np.testing.assert_allclose(answers[0], answers[1], atol=TOLERANCE)


class TestCapacity:
    @pytest.mark.parametrize(
        ("kv_dtype", "bytes_per_number"), [(KvDtype.F32, 4), (KvDtype.F16, 2), (KvDtype.U8, 1)]
    )
    def test_says_what_a_block_weighs(
        self, kv_dtype: KvDtype, bytes_per_number: int, tmp_path: Path
    ) -> None:
        capacity = (
            compiled_tiny(tmp_path, WeightFormat.F32, kv_dtype=kv_dtype)
            .executor(5, RecordingSampler())
            .capacity
        )
        scale_and_zero = 8 if kv_dtype is KvDtype.U8 else 0
        per_head = 16 * bytes_per_number + scale_and_zero  # head size 16
        assert (capacity.num_blocks, capacity.block_size) == (5, 32)
        assert capacity.bytes_per_block == 2 * 2 * 2 * 32 * per_head  # k and v, layers, KV heads

"""Whole evaluations over HTTP, of models whose perplexity and divergence are known."""

import asyncio
from dataclasses import replace
from math import exp
from typing import Any

import pytest

from kvota.tools.evaluate import page
from kvota.tools.evaluate.answers import Dialect
from kvota.tools.evaluate.gate import Rules, Verdict
from kvota.tools.evaluate.run import Evaluation, Options, evaluate
from kvota.tools.evaluate.served import Place
from kvota.tools.evaluate.texts import Text
from kvota.tools.evaluate.windows import BYTES_PER_TOKEN, cut_text
from kvota.tools.load.bench import Unwatched
from kvota.tools.load.cut import INTERRUPTED
from kvota.tools.server import ServerUnusable
from tests.support.fake_backend import FakeBackend, Received, Wire
from tests.tools.evaluate.known_model import (
    LETTERS,
    KnownModel,
    known_model,
    true_divergences,
    true_surprise,
    written_by,
)

BASE = known_model()
WINDOW = 32
BODY = written_by(BASE, 20 * WINDOW)
WINDOWS = [BODY[at : at + WINDOW] for at in range(0, len(BODY), WINDOW)]
OPTIONS = Options(
    texts=[Text("letters", "a test", "CC0", BODY)],
    prompts=[*"abcdefgh", "abc", "bad", "face"],
    window=WINDOW,
    max_tokens=12,
)
Backends = tuple[FakeBackend, FakeBackend]


async def compared(
    backends: Backends, first: KnownModel, second: KnownModel, **changes: Any
) -> Evaluation:
    for backend, model in zip(backends, (first, second), strict=True):
        model.serve(backend)
    places = [Place(backend.url) for backend in backends]
    return await evaluate(places[0], places[1], replace(OPTIONS, **changes), Unwatched())


async def test_perplexity_is_the_true_one(backends: Backends) -> None:
    other = BASE.perturbed(0.5)
    found = await compared(backends, BASE, other)
    whole = found.likelihood[0]
    for model, measured in ((BASE, whole.perplexity_baseline), (other, whole.perplexity_candidate)):
        surprise = true_surprise(model, WINDOWS)
        assert measured == pytest.approx(exp(sum(surprise) / len(surprise)), rel=1e-9)
    assert whole.num_tokens == len(BODY) - len(WINDOWS)


async def test_divergence_is_exact_when_all_tokens_are_told(backends: Backends) -> None:
    other = BASE.perturbed(0.5)
    found = await compared(backends, BASE, other, top=len(LETTERS))
    whole = found.likelihood[0]
    true = true_divergences(BASE, other, WINDOWS)
    assert whole.divergence is not None
    assert whole.divergence.mean == pytest.approx(sum(true) / len(true), rel=1e-4)
    assert whole.covered == pytest.approx(1)


@pytest.mark.parametrize("top", [1, 2, 5])
async def test_divergence_of_few_told_tokens_is_a_lower_bound(backends: Backends, top: int) -> None:
    other = BASE.perturbed(0.5)
    found = await compared(backends, BASE, other, top=top)
    whole = found.likelihood[0]
    true = true_divergences(BASE, other, WINDOWS)
    assert whole.divergence is not None
    assert whole.covered is not None
    assert 0 < whole.divergence.mean < sum(true) / len(true)
    assert whole.covered < 1


async def test_echo_tells_the_same_as_prompt_logprobs(backends: Backends) -> None:
    other = BASE.perturbed(0.5)
    by_id = await compared(backends, BASE, other, top=5)
    silent = {"speaks_prompt_logprobs": False, "tells_token_ids": False}
    by_name = await compared(backends, BASE.like(**silent), other.like(**silent), top=5)
    assert by_name.baseline.dialect is Dialect.ECHO
    assert by_name.agreement == by_id.agreement
    for named, known in zip(by_name.likelihood, by_id.likelihood, strict=True):
        assert named.difference == pytest.approx(known.difference)
        assert named.divergence is not None
        assert known.divergence is not None
        assert named.divergence.mean == pytest.approx(known.divergence.mean)


async def test_a_version_is_as_good_as_itself(backends: Backends) -> None:
    found = await compared(
        backends, BASE, BASE, rules=Rules(max_drop=0, max_kl=1e-6, min_agreement=1)
    )
    assert found.verdict is Verdict.GOOD
    assert found.agreement is not None
    assert found.agreement.whole.mean == 1


async def test_a_much_worse_version_is_found(backends: Backends) -> None:
    found = await compared(backends, BASE, BASE.perturbed(1.5))
    assert found.verdict is Verdict.WORSE
    assert found.checks[0].low is not None
    assert found.checks[0].low > 0.05


async def test_a_better_version_is_good(backends: Backends) -> None:
    found = await compared(backends, BASE.perturbed(1.5), BASE)
    assert found.verdict is Verdict.GOOD


async def test_other_token_ids_leave_only_the_text_to_compare(backends: Backends) -> None:
    other = BASE.perturbed(0.5).like(letters=LETTERS[::-1])
    found = await compared(backends, BASE, other)
    assert found.not_by_token == "the two tokenizers read the letters text differently"
    assert found.likelihood[0].divergence is None
    assert found.likelihood[0].perplexity_candidate > found.likelihood[0].perplexity_baseline
    assert found.agreement is not None
    assert not found.agreement.is_tokens


async def test_without_a_tokenizer_perplexity_is_still_the_true_one(backends: Backends) -> None:
    found = await compared(backends, BASE.like(has_tokenizer=False), BASE)
    assert found.not_by_token is not None
    assert "has no /tokenize" in found.not_by_token
    surprise = true_surprise(BASE, cut_text(BODY, WINDOW * BYTES_PER_TOKEN))
    whole = found.likelihood[0]
    for measured in (whole.perplexity_baseline, whole.perplexity_candidate):
        assert measured == pytest.approx(exp(sum(surprise) / len(surprise)))


async def test_a_server_without_log_probabilities_cannot_be_judged(backends: Backends) -> None:
    mute = BASE.like(speaks_prompt_logprobs=False, speaks_echo=False)
    found = await compared(backends, BASE, mute)
    assert found.verdict is Verdict.UNDECIDED
    assert f"{backends[1].url} tells no log probabilities" in found.no_likelihood
    assert found.agreement is not None


async def test_a_start_token_precedes_every_window_and_is_not_scored(backends: Backends) -> None:
    model = BASE.like(has_start=True)
    found = await compared(backends, model, model)
    assert found.likelihood[0].num_tokens == len(BODY)


async def test_fewer_likeliest_tokens_are_asked_for_where_there_is_a_limit(
    backends: Backends,
) -> None:
    found = await compared(backends, BASE, BASE.like(top_max=5))
    assert (found.baseline.top, found.candidate.top) == (20, 5)


async def test_a_busy_server_is_waited_for(backends: Backends) -> None:
    found = await compared(backends, BASE, BASE.like(num_busy=[3]))
    assert found.verdict is Verdict.GOOD


async def test_a_server_that_stays_busy_ends_the_evaluation(backends: Backends) -> None:
    with pytest.raises(ServerUnusable, match="503: busy"):
        await compared(backends, BASE, BASE.like(num_busy=[10_000]))


async def test_a_missing_model_is_named_with_those_that_are_there(backends: Backends) -> None:
    BASE.serve(backends[0])
    places = Place(backends[0].url), Place(backends[0].url, "other")
    with pytest.raises(ServerUnusable, match="has no model other; it has fake-model"):
        await evaluate(*places, OPTIONS, Unwatched())


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http://a:1/v1", Place("http://a:1", None)),
        ("org/m-int8", Place("http://here", "org/m-int8")),
        ("m@https://b/v1/", Place("https://b", "m")),
    ],
)
def test_a_place_is_a_url_a_model_or_both(text: str, place: Place) -> None:
    assert Place.parse(text, url="http://here/v1") == place


async def stopped(backends: Backends, after: str, num: int) -> Evaluation:
    """Ctrl-C once the baseline was asked for so many `after` (a field of what is asked)."""
    for backend in backends:
        BASE.serve(backend)
    serve = backends[0].overrides["/v1/completions"]
    num_left = num

    async def counting(asked: Received, wire: Wire) -> None:
        nonlocal num_left
        num_left -= after in asked.json
        if num_left == 0:
            running.cancel()
        await serve(asked, wire)

    backends[0].overrides["/v1/completions"] = counting
    places = [Place(backend.url) for backend in backends]
    running = asyncio.create_task(evaluate(places[0], places[1], OPTIONS, Unwatched()))
    return await running


async def test_what_was_read_until_it_is_interrupted_is_kept_and_concludes_nothing(
    backends: Backends,
) -> None:
    found = await stopped(backends, "prompt_logprobs", 15)
    assert found.cut is INTERRUPTED
    assert 0 < found.likelihood[0].num_tokens < len(BODY) - len(WINDOWS)
    assert found.agreement is None
    assert found.verdict is Verdict.UNDECIDED
    assert page.verdict_text(found).startswith("Incomplete: interrupted. Undecided:")
    written = page.as_json(found, 0.0)
    assert (written["verdict"], written["incomplete"]) == ("undecided", "interrupted")


async def test_interrupted_before_anything_is_measured_nothing_is_kept(backends: Backends) -> None:
    with pytest.raises(asyncio.CancelledError):
        await stopped(backends, "model", 1)


async def test_what_was_read_until_a_server_was_gone_is_kept(backends: Backends) -> None:
    for backend in backends:
        BASE.serve(backend)
    serve = backends[1].overrides["/v1/completions"]

    async def gone_at_the_prompts(asked: Received, wire: Wire) -> None:
        if asked.json["max_tokens"] == OPTIONS.max_tokens:
            wire.reset()
            return
        await serve(asked, wire)

    backends[1].overrides["/v1/completions"] = gone_at_the_prompts
    places = [Place(backend.url) for backend in backends]
    found = await evaluate(places[0], places[1], OPTIONS, Unwatched())
    assert found.cut is not None
    assert not found.cut.is_interrupt
    assert found.cut.reason.startswith("Cannot talk to")
    assert found.likelihood[0].num_tokens == len(BODY) - len(WINDOWS)
    assert found.verdict is Verdict.UNDECIDED

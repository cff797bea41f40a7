"""How the client wants tokens chosen, with the defaults of OpenAI and vLLM."""

from random import Random
from typing import Final

from kvota.core.request import SamplingParams
from kvota.node.served import ServedModel
from kvota.wire import checks
from kvota.wire.openai import GenerationFields

# Below this, dividing the logits by the temperature leaves only the most likely token anyway.
TEMPERATURE_MIN: Final = 1e-3
_SEED_BITS: Final = 64  # of a client's seed, which may be negative


def sampling_params(
    body: GenerationFields, model: ServedModel, logprobs: int | None, chance: Random
) -> SamplingParams:
    """Raises InvalidRequest for token ids outside the vocabulary. Without a seed, one is drawn."""
    stop_ids = body.stop_token_ids or []
    checks.check_token_ids(stop_ids, model.vocab_size, "stop_token_ids")
    temperature = _or(body.temperature, 1.0)
    seed = drawn_seed(chance) if body.seed is None else body.seed % 2**_SEED_BITS
    return SamplingParams(
        temperature=temperature if temperature >= TEMPERATURE_MIN else 0.0,
        top_p=_or(body.top_p, 1.0),
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=checks.logit_bias(body, model.vocab_size),
        seed=seed,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(stop_ids) | (frozenset() if body.ignore_eos else model.eos_ids),
        logprobs=logprobs,
    )


def drawn_seed(chance: Random) -> int:
    """For what the client gave no seed."""
    return chance.getrandbits(63)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

"""What a backend answers whole and without generating: one row for each path.

    path              work       tokens        what of it is checked
    /v1/embeddings    EMBEDDING  of all texts  their number and length
    /tokenize         LOOKUP     none          as a prompt, or a chat
    /detokenize       LOOKUP     none          its length

A new one is a new row here, and a line in app.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvota.gateway.calls import Work
from kvota.gateway.input_checks import InputLimits, check_input, check_length, num_characters
from kvota.gateway.upstream.estimate import estimated_tokens
from kvota.wire.decode import BodyDecoder
from kvota.wire.embeddings import EmbeddingRequest, inputs_of
from kvota.wire.openai import DetokenizeRequest, TokenizeRequest

TOKENS_PER_TEXT: Final = 2  # what an encoder puts around each: [CLS] and [SEP], or BOS and EOS
T = TypeVar("T", EmbeddingRequest, TokenizeRequest, DetokenizeRequest)


@dataclass(frozen=True, slots=True)
class Load:
    """What a body asks of a backend. `tokens` is a guess, until the backend has counted."""

    tokens: int = 0
    num_inputs: int | None = None  # texts to embed


@dataclass(frozen=True, slots=True, kw_only=True)
class PassingKind(Generic[T]):
    """`weigh` raises InvalidRequest for a body that is over a limit."""

    name: str  # in the log and the journal
    path: str
    work: Work
    decoder: BodyDecoder[T]
    weigh: Callable[[T, InputLimits], Load]
    field: str  # of which a client can send less


def _weigh_embedding(body: EmbeddingRequest, limits: InputLimits) -> Load:
    inputs = inputs_of(body.input, num_max=limits.num_inputs_max)
    check_length("input", sum(map(len, inputs)), limits.prompt_characters_max)
    texts = "".join(one for one in inputs if isinstance(one, str))
    num_ids = sum(len(one) for one in inputs if not isinstance(one, str))
    tokens = estimated_tokens(texts.encode()) + num_ids + TOKENS_PER_TEXT * len(inputs)
    return Load(tokens, len(inputs))


def _weigh_tokenize(body: TokenizeRequest, limits: InputLimits) -> Load:
    check_input(body, limits)
    check_length("prompt", num_characters(body.prompt), limits.prompt_characters_max)
    return Load()


def _weigh_detokenize(body: DetokenizeRequest, limits: InputLimits) -> Load:
    check_length("tokens", len(body.tokens or ()), limits.prompt_characters_max)
    return Load()


EMBEDDINGS: Final = PassingKind(
    name="embeddings",
    path="/v1/embeddings",
    work=Work.EMBEDDING,
    decoder=BodyDecoder(EmbeddingRequest),
    weigh=_weigh_embedding,
    field="input",
)
TOKENIZE: Final = PassingKind(
    name="tokenize",
    path="/tokenize",
    work=Work.LOOKUP,
    decoder=BodyDecoder(TokenizeRequest),
    weigh=_weigh_tokenize,
    field="prompt",
)
DETOKENIZE: Final = PassingKind(
    name="detokenize",
    path="/detokenize",
    work=Work.LOOKUP,
    decoder=BodyDecoder(DetokenizeRequest),
    weigh=_weigh_detokenize,
    field="tokens",
)

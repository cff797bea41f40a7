"""POST /v1/embeddings: OpenAI's request and response."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvota.core.errors import InvalidRequest
from kvota.wire.openai import PositiveCount, TokenId

NUM_INPUTS_MAX = 2048  # of one request, as OpenAI has it


class EmbeddingRequest(Struct, kw_only=True):
    """Unknown fields are skipped; `user` is known and without effect."""

    input: str | list[Any] | None = None  # text, texts, token ids, or lists of token ids
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class Embedding(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of little-endian f32 where the client asked for it


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def inputs_of(
    given: str | list[Any] | None, *, num_max: int = NUM_INPUTS_MAX
) -> Sequence[str | list[int]]:
    """The inputs one by one. Raises InvalidRequest naming `input`."""
    if given is None or given == []:
        raise InvalidRequest("`input` is missing or empty.", param="input")
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {str}:
        return _at_most(num_max, given)
    rows = [given] if kinds == {int} else _at_most(num_max, given)
    try:
        return msgspec.convert(rows, list[TokenIds])
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"`input` must be a text, texts, token ids, or lists of token ids: {error}.",
            param="input",
        ) from None


def _at_most(num_max: int, inputs: list[Any]) -> list[Any]:
    if len(inputs) > num_max:
        raise InvalidRequest(
            f"`input` has {len(inputs)} entries; the limit is {num_max}.", param="input"
        )
    return inputs

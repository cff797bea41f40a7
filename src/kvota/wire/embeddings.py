"""POST /v1/embeddings: OpenAI's request and response."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

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

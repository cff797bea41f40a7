"""The kinds of backend the gateway knows, and in what they differ. A new kind is a new row."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class BackendKind(StrEnum):
    KVOTA = "kvota"  # a node of ours: its own desk admits
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    TGI = "tgi"
    OLLAMA = "ollama"
    OPENAI = "openai"  # anything else that speaks the dialect


class TokenizeForm(StrEnum):
    """How a backend counts the tokens of a prompt, if it does."""

    VLLM = "vllm"  # POST /tokenize with prompt, or with messages and all that shapes the template
    LLAMACPP = "llamacpp"  # POST /apply-template with messages, POST /tokenize with content
    TGI = "tgi"  # POST /chat_tokenize with messages, POST /tokenize with inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What may be sent to a backend of one kind, and where it is asked for its health."""

    health_path: str
    health_timeout_s: float = 2.0
    has_stream_usage: bool = True  # knows stream_options.include_usage
    has_running_usage: bool = False  # knows stream_options.continuous_usage_stats
    tokenize: TokenizeForm | None = None
    has_own_desk: bool = False


TRAITS: Final[Mapping[BackendKind, Traits]] = MappingProxyType(
    {
        BackendKind.KVOTA: Traits(
            health_path="/ready",
            tokenize=TokenizeForm.VLLM,
            has_own_desk=True,
        ),
        BackendKind.VLLM: Traits(
            health_path="/health", has_running_usage=True, tokenize=TokenizeForm.VLLM
        ),
        # Its page looks once a second whether a token came, for 20 s: a long prompt may be at work.
        BackendKind.SGLANG: Traits(health_path="/health", health_timeout_s=25.0),
        BackendKind.LLAMACPP: Traits(health_path="/health", tokenize=TokenizeForm.LLAMACPP),
        BackendKind.TGI: Traits(health_path="/health", tokenize=TokenizeForm.TGI),
        BackendKind.OLLAMA: Traits(health_path="/api/version"),
        BackendKind.OPENAI: Traits(health_path="/v1/models"),
    }
)

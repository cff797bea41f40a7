"""What every reader of a tokenizer hands over, whatever file it came from.

`hf_tokenizer.py` and `gguf_tokenizer.py` produce it; `tokenizer.py` is built from it.
"""

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A vocabulary with its roles. `prefix` and `suffix` frame every prompt the model reads."""

    core: tokenizers.Tokenizer
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None  # the one that templates call eos_token
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()  # every id that ends a turn, eos_id among them
    chat_template: str | None = None
    tool_template: str | None = None  # instead of it when a request brings tools

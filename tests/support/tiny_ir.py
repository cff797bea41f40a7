"""The OpenVINO exports of tests/golden/tiny_ir, made complete: with a tokenizer of their size.

Their vocabulary is 256, so the tokenizer knows the 243 bytes that UTF-8 uses and has no merges:

    0 .. 2      special: <|endoftext|>, <|im_start|>, <|im_end|>
    3 .. 245    single bytes
    246 .. 255  spare special tokens, for real exports have some too
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_models import write_tokenizer
from tests.support.tiny_tokenizer import FIRST_BYTE_ID, SPECIAL_TOKENS, tiny_tokenizer

TINY_IR = Path(__file__).parents[1] / "golden" / "tiny_ir"
ORACLE: dict[str, Any] = json.loads((TINY_IR / "oracle.json").read_text(encoding="utf-8"))
EXPORTS = ("mistral_f16", "qwen3_int8")
VOCAB_SIZE = 256
CONTEXT = 512
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def write_ir(folder: Path, export: str) -> Path:
    """A directory that can be served: graph, weights, config, tokenizer, chat template."""
    shutil.copytree(TINY_IR / export, folder)
    write_tokenizer(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token for each byte that can occur, and nothing longer."""
    full = tiny_tokenizer()
    used = [byte for byte in range(256) if byte not in _NEVER_IN_UTF8]
    letters = [str(full.id_to_token(FIRST_BYTE_ID + byte)) for byte in used]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    spare = [f"<|spare_{number}|>" for number in range(VOCAB_SIZE - len(vocab))]
    names = [*SPECIAL_TOKENS, *spare]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer

import re
from pathlib import Path

import pytest

from kvota.core.errors import ModelError
from kvota.model.load import load_model
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import tiny_architecture, write_safetensors
from tests.support.tiny_tokenizer import VOCAB_SIZE


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_counts(
    tmp_path: Path,
) -> None:
    write_safetensors(tmp_path, architecture=tiny_architecture("llama", vocab_size=256))
    with pytest.raises(ModelError, match=rf"tokenizer has {VOCAB_SIZE} tokens.* only 256"):
        load_model(tmp_path)


def test_a_gguf_file_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", with_tokenizer=False).path
    with pytest.raises(ModelError, match=rf"^{re.escape(str(path))}: .*tokenizer"):
        load_model(path)


def test_a_template_that_does_not_compile_names_the_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path))}: .* does not compile"):
        load_model(tmp_path)

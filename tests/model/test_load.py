import json
import re
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError, ModelError, UnsupportedModel
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


def test_a_vocabulary_that_grammars_cannot_follow_names_the_model(tmp_path: Path) -> None:
    """The library that follows grammars is stricter about a tokenizer than the one that encodes."""
    write_safetensors(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["vocab"]["Ġthe"]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path))}.*Ġthe"):
        load_model(tmp_path)


def test_a_decoder_that_is_not_known_names_the_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
    with pytest.raises(UnsupportedModel, match=rf"^{re.escape(str(tmp_path))}: .*no decoder"):
        load_model(tmp_path)


@pytest.mark.parametrize(("length", "least"), [(1, "at least 2"), (257, "at most 256")])
def test_a_context_that_no_answer_or_no_model_fits_is_refused(
    tmp_path: Path, length: int, least: str
) -> None:
    write_safetensors(tmp_path)
    with pytest.raises(ConfigError, match=rf"max_model_len is {length}.*{least}"):
        load_model(tmp_path, max_model_len=length)

from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.tools.evaluate.texts import Text, shipped_prompts, shipped_texts, text_of

TEXTS = shipped_texts()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_every_shipped_text_is_free_and_says_where_it_is_from(text: Text) -> None:
    assert text.licence in ("public domain", "CC0-1.0")
    assert text.source
    assert len(text.body.encode()) > 1000
    assert "\N{REPLACEMENT CHARACTER}" not in text.body
    assert not text.body.startswith(("Source:", "\n"))


def test_texts_are_in_several_scripts_and_in_code() -> None:
    names = [text.name for text in TEXTS]
    assert len(set(names)) == len(names)
    assert {"english", "chinese", "russian", "japanese", "python"} <= set(names)


def test_prompts_are_different_and_not_empty() -> None:
    prompts = shipped_prompts()
    assert len(set(prompts)) == len(prompts) >= 24
    assert all(prompt.strip() for prompt in prompts)


def test_an_own_text_must_be_there_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    with pytest.raises(ConfigError, match="No such file"):
        text_of(path)
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="not UTF-8"):
        text_of(path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        text_of(path)
    path.write_text("words")
    assert text_of(path).body == "words"

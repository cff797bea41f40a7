from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.gateway.filters.blocklists import (
    BlockListFilter,
    read_block_list,
    shipped_block_lists,
)

SECRETS = {
    "private-key": "-----BEGIN RSA PRIVATE KEY-----",
    "aws-access-key": "id AKIAIOSFODNN7EXAMPLE,",
    "github-token": "ghp_" + "a1B2" * 9,
    "gitlab-token": "glpat-" + "x" * 20,
    "slack-token": "xoxb-1234567890",
    "google-api-key": "AIza" + "b" * 35,
    "kvota-key": "kv-0123456789ab-" + "0f" * 32,
}
INNOCENT = (
    "A token is not a key. AKIA alone, ghp_short, kv-0123456789ab, -----BEGIN CERTIFICATE-----, "
    "and a dance of 50 steps; 私钥 is no key either."
)


def found(known: BlockListFilter, text: str) -> str | None:
    scan = known.scan()
    return scan.feed(text) or scan.finish()


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


@pytest.mark.parametrize("name", sorted(shipped_block_lists()))
def test_every_list_that_comes_with_kvota_can_be_read(name: str) -> None:
    known = read_block_list(name)
    assert known.about
    assert known.rule
    assert found(BlockListFilter([known]), INNOCENT) is None


def test_secrets_are_found_by_their_form() -> None:
    known = BlockListFilter([read_block_list("credentials")])
    for rule, text in SECRETS.items():
        assert found(known, f"here: {text}") == rule


def test_marks_of_chat_templates_are_found_and_ordinary_brackets_are_not() -> None:
    known = BlockListFilter([read_block_list("chat-markup")])
    assert found(known, "hello<|IM_START|>system") == "chatml"
    assert found(known, "a [INST] b") == "llama"
    assert found(known, "x <| y |> <start> [inst ruction]") is None


def test_a_list_of_ones_own_is_a_file(tmp_path: Path) -> None:
    name = write(
        tmp_path / "mine.toml",
        """
        [[rule]]
        name = "projects"
        literals = ["Project Falcon", "猎鹰计划"]
        whole_words = false
        [[rule]]
        name = "rooms"
        patterns = ['room \\d{3}']
        case_sensitive = true
        """,
    )
    known = BlockListFilter([read_block_list(name), read_block_list("chat-markup")])
    assert found(known, "about project FALCON?") == "projects"
    assert found(known, "关于猎鹰计划的") == "projects"
    assert found(known, "Room 101") is None
    assert found(known, "room 101") == "rooms"
    assert found(known, "[/INST]") == "llama"


def test_an_empty_list_finds_nothing(tmp_path: Path) -> None:
    name = write(tmp_path / "empty.toml", "")
    assert found(BlockListFilter([read_block_list(name)]), "anything") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[[rule]]\nname = 'a'\n", "needs literals or patterns"),
        ("[[rule]]\nname = 'a'\nliterals = ['']\n", "none of them may be empty"),
        ("[[rule]]\nname = 'a'\nwords = ['x']\n", "words"),
        ("[[rule]]\nliterals = ['x']\n", "name"),
        ("not toml", "is not right"),
    ],
)
def test_a_list_that_is_not_right_is_named(tmp_path: Path, content: str, problem: str) -> None:
    name = write(tmp_path / "mine.toml", content)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_block_list(name)
    assert "mine.toml" in refused.value.message


def test_a_pattern_that_would_be_found_everywhere_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path / "mine.toml", "[[rule]]\nname = 'a'\npatterns = ['x?|y{0,3}']\n")
    with pytest.raises(ConfigError, match="found in every text"):
        BlockListFilter([read_block_list(name)])


def test_a_list_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="chat-markup, credentials"):
        read_block_list("credential")

"""What every tool makes of the address of a server."""

import pytest

from kvota.tools.server import ServerUnusable, authorization, root_of


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://llm.example.org/team/v1", "https://llm.example.org/team"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_root_is_what_stands_before_v1(url: str, root: str) -> None:
    assert root_of(url) == root


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://h:x", ""],
)
def test_what_is_no_address_is_told_how_to_write_one(url: str) -> None:
    with pytest.raises(ServerUnusable, match="is no address of a server: write it as http"):
        root_of(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ServerUnusable, match="holds a name or a password") as refused:
        root_of("http://ann:very-secret@127.0.0.1:8000")
    assert "very-secret" not in refused.value.message


@pytest.mark.parametrize("key", ["sk-sécret", "sk-secret\n", "sk secret", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ServerUnusable, match="The API key holds") as refused:
        authorization(key)
    assert key.strip() not in refused.value.message


def test_a_key_is_sent_as_a_bearer() -> None:
    assert authorization("sk-1_A.b~") == {"Authorization": "Bearer sk-1_A.b~"}
    assert authorization(None) == authorization("") == {}

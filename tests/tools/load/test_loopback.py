"""Load stays on this machine unless whoever runs it says otherwise."""

import pytest

from kvota.tools.load.loopback import FLAG, ForeignHost, check_host


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://127.8.8.8/v1",
        "http://localhost:1",
        "http://[::1]:8000",
        "127.0.0.1:8000",
    ],
)
def test_this_machine_may_be_loaded(url: str) -> None:
    check_host(url, is_allowed=False)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:8000",
        "https://api.example.com/v1",
        "http://0.0.0.0:8000",
        "http://localhost.example.com",
        "http://127.0.0.1@example.com/",
        "http://[2001:db8::1]:8000",
        "",
    ],
)
def test_another_is_not_loaded_without_the_word(url: str) -> None:
    with pytest.raises(ForeignHost, match=FLAG):
        check_host(url, is_allowed=False)
    check_host(url, is_allowed=True)

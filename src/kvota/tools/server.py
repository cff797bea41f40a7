"""What every tool says when a server cannot be used."""

import re
from typing import Final
from urllib.parse import urlsplit

import httpx

from kvota.core.errors import KvotaError

_HEADER_TEXT: Final = re.compile(r"[!-~]+")  # ASCII that is seen


class ServerUnusable(KvotaError):
    """The server could not be reached, or answered with an error. The message says which."""


def root_of(url: str) -> str:
    """The server's root, from a URL with or without a trailing /v1.

    Raises ServerUnusable for what is no address of a server, and for one that holds a password,
    because reports and messages show it.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number of a port
        is_address = False
    if not is_address:
        raise ServerUnusable(
            f"{url!r} is no address of a server: write it as http://127.0.0.1:8000."
        )
    if "@" in parts.netloc:
        raise ServerUnusable(
            f"The address of {parts.hostname} holds a name or a password, which reports "
            "would show. Leave it out; a key is given with --api-key or KVOTA_API_KEY."
        )
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """Raises ServerUnusable for a key that no header can carry. The message does not show it."""
    if not api_key:
        return {}
    if not _HEADER_TEXT.fullmatch(api_key):
        raise ServerUnusable(
            "The API key holds a space, a line end or a character that no key has: copy it again."
        )
    return {"Authorization": f"Bearer {api_key}"}


def error_text(response: httpx.Response) -> str:
    """A refusal in one line: status, message, and when to come back."""
    wait = response.headers.get("Retry-After")
    again = f" Try again in {wait} s." if wait else ""
    return f"The server answered {response.status_code}: {message_of(response)}{again}"


def message_of(response: httpx.Response) -> str:
    """The error's message, or the beginning of whatever came instead."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def connection_text(base_url: httpx.URL, error: httpx.HTTPError) -> str:
    reason = str(error).rstrip(".") or type(error).__name__
    return (
        f"Cannot talk to {base_url}: {reason}. Is the server running there? "
        "Start one with `kvota serve`, or name another with --url."
    )

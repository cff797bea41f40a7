"""What every tool says when a server cannot be used."""

import httpx

from kvota.core.errors import KvotaError


class ServerUnusable(KvotaError):
    """The server could not be reached, or answered with an error. The message says which."""


def root_of(url: str) -> str:
    """The server's root, from a URL with or without a trailing /v1."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


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
    reason = str(error).rstrip(".")
    return (
        f"Cannot talk to {base_url}: {reason}. Is the server running there? "
        "Start one with `kvota serve`, or name another with --url."
    )

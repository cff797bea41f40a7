"""The desk of a running server: read its settings, and set them without a restart.

GET /admin/desk     the settings in force
PUT /admin/desk     change some; the answer is what is in force then
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx

from kvota.tools.load.toml_line import edit, edited
from kvota.tools.server import ServerUnusable, authorization, connection_text, error_text, root_of

TIMEOUT_S = 10.0
PATH: Final = "/admin/desk"
SECTION_OF: Final[Mapping[str, str]] = MappingProxyType(
    {"max_running_requests": "engine", "max_waiting_queue": "desk"}
)
NO_DESK = (
    "This server has no desk whose settings can be changed while it runs, so nothing can be "
    "applied. Measure without --apply; then start vLLM with --max-num-seqs, or set the values "
    "in kvota.toml and restart kvota."
)


def get_desk(url: str, api_key: str | None) -> dict[str, Any]:
    """What is in force. Raises ServerUnusable, also where there is no desk."""
    return _asked(url, api_key, None)


def put_desk(url: str, api_key: str | None, settings: Mapping[str, int]) -> dict[str, Any]:
    """Set them; what is in force then. Raises ServerUnusable, also where there is no desk."""
    return _asked(url, api_key, dict(settings))


def _asked(url: str, api_key: str | None, settings: dict[str, int] | None) -> dict[str, Any]:
    method = "GET" if settings is None else "PUT"
    try:
        with httpx.Client(
            base_url=root_of(url), headers=authorization(api_key), timeout=TIMEOUT_S,
            trust_env=False,
        ) as client:  # fmt: skip
            response = client.request(method, PATH, json=settings)
    except httpx.HTTPError as error:
        raise ServerUnusable(connection_text(httpx.URL(root_of(url)), error)) from error
    if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        raise ServerUnusable(NO_DESK)
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ServerUnusable(f"{error_text(response)} Give an operator's key with --api-key.")
    if not response.is_success:
        raise ServerUnusable(error_text(response))
    return _desk_of(response)


def _desk_of(response: httpx.Response) -> dict[str, Any]:
    """Raises ServerUnusable for a page of something else."""
    try:
        desk: dict[str, Any] = response.json()
        is_desk = SECTION_OF.keys() <= desk.keys()
    except (ValueError, AttributeError):
        is_desk = False
    if not is_desk:
        raise ServerUnusable(NO_DESK)
    return desk


def write_settings(path: Path, settings: Mapping[str, int]) -> None:
    """Into kvota.toml, each in its section; comments stay. Raises CannotEdit."""
    edit(path, _placed(settings))


def check_writable(path: Path, settings: Mapping[str, int]) -> None:
    """Raises CannotEdit where `write_settings` would, as far as that can be known before."""
    edited(path, _placed(settings))


def _placed(settings: Mapping[str, int]) -> dict[tuple[str, str], int]:
    return {(SECTION_OF[name], name): value for name, value in settings.items()}

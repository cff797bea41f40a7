"""What a request line asks for, in the parts that ASGI wants."""

from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import Scope


def request_line(parser: Any, url: bytes) -> Scope:
    """What ASGI calls the scope, but for headers and who speaks to whom. Raises as `split_target`.

    `parser` has read the head of an HTTP/1 request.
    """
    path, raw_path, query = split_target(url)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": parser.get_http_version(),
        "scheme": "http",
        "method": parser.get_method().decode("ascii"),
        "root_path": "",
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
    }


def split_target(url: bytes) -> tuple[str, bytes, bytes]:
    """The path, the same as it was sent, and the query.

    Raises HttpParserError for what is no URL, UnicodeDecodeError for what is not ASCII.
    """
    raw_path, query = _split(url)
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path, raw_path, query


def _split(url: bytes) -> tuple[bytes, bytes]:
    if url.startswith(b"/") and b"?" not in url and b"#" not in url:
        return url, b""
    parts = httptools.parse_url(url)
    return parts.path or b"/", parts.query or b""

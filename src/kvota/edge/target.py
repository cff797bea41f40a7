"""What a request line asks for, in the parts that ASGI wants."""

from urllib.parse import unquote

import httptools


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

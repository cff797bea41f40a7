"""The answer to what never became a request: the same JSON as every other error, and the end."""

from typing import Final

import msgspec

_STATUS_LINES: Final = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
    500: b"HTTP/1.1 500 Internal Server Error\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n",
}
_KINDS: Final = {500: "server_error", 503: "overloaded_error"}
_HEAD: Final = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


def refusal(status: int, code: str, message: str) -> bytes:
    """All of it, as it goes out."""
    kind = _KINDS.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    return _STATUS_LINES[status] + _HEAD % len(body) + body

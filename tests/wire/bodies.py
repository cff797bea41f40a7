"""Small valid bodies to which a test adds its own fields."""

from typing import Any

import msgspec


def chat_body(**fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return msgspec.json.encode(body)


def completion_body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": "hi", **fields})

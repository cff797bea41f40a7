"""What a backend is sent: the client's fields, and the few that the gateway changes.

The body's top level is taken apart and put together again, so a field that is there twice is sent
once, and everything below the top level arrives as the client wrote it. Changed are

    model            the backend's own name of it
    stream           always true, where the answer can be streamed at all: only what streams can
                     be counted while it grows, and stopped when nobody wants it any more
    stream_options   include_usage, and continuous_usage_stats where the backend knows it; what the
                     client did not ask for is taken out again on the way back (`passage.py`).
                     whole_tool_calls to a node, where the client reads no stream: half a call
                     cannot be taken out again

and what only kvota understands is left out for others. Of the client's headers only those that
name or trace a request go on: no credential, no cookie, nothing about the connection.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvota.gateway.upstream.kinds import TRAITS, BackendKind

_OURS: Final = ("use_prefix_cache",)
# Answers with these cannot be streamed: OpenAI's and vLLM's own rule.
_WHOLE_ONLY: Final = ("prompt_logprobs", "use_beam_search")
_TRACING: Final = (b"traceparent", b"tracestate")
_FOR_NODES: Final = (b"x-kvota-deadline-s", b"x-kvota-priority")
_ABSENT: Final = (b"null", b"false")
_NOTHING: Final[Mapping[str, Any]] = {}
_TRUE: Final = msgspec.Raw(b"true")
_FALSE: Final = msgspec.Raw(b"false")
_USAGE: Final = msgspec.Raw(b'{"include_usage":true}')
_RUNNING_USAGE: Final = msgspec.Raw(b'{"include_usage":true,"continuous_usage_stats":true}')
_USAGE_OF_WHOLE: Final = msgspec.Raw(b'{"include_usage":true,"whole_tool_calls":true}')
_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields)


def outgoing_body(
    body: bytes, *, model: str, kind: BackendKind, also: Mapping[str, Any] = _NOTHING
) -> bytes:
    """The client's body, which has been checked, as `kind` of backend gets it.

    `also` sets further fields, such as a max_tokens that the client left to us.
    """
    fields = _fields.decode(body)
    traits = TRAITS[kind]
    if kind is not BackendKind.KVOTA:
        for name in _OURS:
            fields.pop(name, None)
    _put(fields, {"model": model, **also})
    fields.pop("stream_options", None)
    is_streamed = is_streamable(fields)
    if is_streamed and traits.has_stream_usage:
        usage = _RUNNING_USAGE if traits.has_running_usage else _USAGE
        is_read_whole = kind is BackendKind.KVOTA and _is_absent(fields, "stream")
        fields["stream_options"] = _USAGE_OF_WHOLE if is_read_whole else usage
    fields["stream"] = _TRUE if is_streamed else _FALSE
    return msgspec.json.encode(fields)


def renamed_body(body: bytes, *, model: str) -> bytes:
    """A body that is passed on as it is, such as one for embeddings, with the backend's name."""
    fields = _fields.decode(body)
    _put(fields, {"model": model})
    return msgspec.json.encode(fields)


def is_streamable(fields: Mapping[str, msgspec.Raw]) -> bool:
    asked = [name for name in _WHOLE_ONLY if name in fields]
    return all(_is_absent(fields, name) for name in asked)


def _is_absent(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    return name not in fields or bytes(fields[name]) in _ABSENT


def outgoing_headers(
    client: Mapping[bytes, bytes], *, request_id: str, kind: BackendKind
) -> dict[str, str]:
    """What of a client's headers a backend may see. The credential is the connection's own."""
    passed = _TRACING + (_FOR_NODES if kind is BackendKind.KVOTA else ())
    headers = {name.decode(): client[name].decode("latin-1") for name in passed if name in client}
    headers["x-request-id"] = request_id
    return headers


def _put(fields: _Fields, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))

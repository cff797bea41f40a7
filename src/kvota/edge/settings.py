"""What an operator can set about HTTP itself. Times are seconds, sizes bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    max_body_bytes: int = 8 * 2**20
    # Of all requests that have no whole answer yet. Beyond it only small bodies are taken.
    max_bodies_bytes: int = 256 * 2**20
    queue_timeout_s: float = 30.0  # to the first chunk
    request_timeout_s: float = 120.0  # arrival to the last token
    heartbeat_s: float = 10.0  # a stream is never silent for longer
    # A reader that takes nothing for so long is cut off: it holds KV that others wait for.
    send_timeout_s: float = 30.0
    body_timeout_s: float = 30.0  # to receive the whole body
    cors_origins: tuple[str, ...] = ()  # "*" allows every page
    # Whoever connects is a gateway of ours, and its word on whose request it is counts.
    trusts_gateway: bool = False

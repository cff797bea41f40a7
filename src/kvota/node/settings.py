"""What an operator can set about the HTTP side of a node. Times are seconds, sizes bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    max_body_bytes: int = 8 * 2**20
    queue_timeout_s: float = 30.0  # to the first chunk
    request_timeout_s: float = 120.0  # arrival to the last token
    heartbeat_s: float = 10.0  # a stream is never silent for longer
    # A reader that takes nothing for so long is cut off: it holds KV that others wait for.
    send_timeout_s: float = 30.0
    body_timeout_s: float = 30.0  # to receive the whole body
    cors_origins: tuple[str, ...] = ()  # "*" allows every page
    prompt_threads: int = 2  # for templates, long prompts and grammars
    num_waiting_prompts_max: int = 64  # being prepared or waiting for a thread
    prompt_timeout_s: float = 10.0  # to render and tokenize one request's prompts
    grammar_timeout_s: float = 2.0  # to compile what the output must follow
    # Prompts up to this many characters are tokenized in place: a thread's hop costs more.
    inline_characters_max: int = 20_000

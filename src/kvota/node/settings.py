"""What an operator can set about the HTTP side of a node. Times are seconds, sizes bytes."""

from dataclasses import dataclass

from kvota.edge.settings import EdgeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(EdgeSettings):
    max_bodies_bytes: int = 64 * 2**20  # and what becomes of them: less than the bill's reserve
    prompt_threads: int = 2  # for templates, long prompts and grammars
    # Bodies of requests that are being prepared or wait for a thread, all together.
    waiting_body_bytes_max: int = 64 * 2**20
    prompt_timeout_s: float = 10.0  # to render and tokenize one request's prompts
    grammar_timeout_s: float = 2.0  # to compile what the output must follow
    # Up to this many characters are tokenized in place, and tokens read: a thread's hop costs more.
    inline_characters_max: int = 20_000

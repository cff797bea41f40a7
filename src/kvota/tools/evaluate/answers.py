"""Log probabilities and tokens, out of what servers answer to /v1/completions.

Two dialects tell the log probabilities of a prompt:

    prompt_logprobs: k                      vLLM, kvota: by token id, in choices[].prompt_logprobs
    echo: true, logprobs: k, max_tokens: 0  OpenAI's old one: by name, in choices[].logprobs

Names are ambiguous where a token is half a character; such tokens are left out of the likeliest,
which only makes the divergence's bound smaller. The token that followed is known anyway.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvota.tools.evaluate.divergence import LOGPROB_MIN, Position

FOLLOWED = "<what followed>"  # stands for the prompt's own token where only names are told
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Dialect(Enum):
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"


class Unexpected(ValueError):
    """The answer does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt's places; None where nothing precedes. `names` of the tokens, where told."""

    positions: Sequence[Position | None]
    names: Sequence[str] = ()

    @property
    def known(self) -> list[Position]:
        return [one for one in self.positions if one is not None]


def asked_for(dialect: Dialect, top: int, num_output: int) -> dict[str, Any]:
    """The fields that ask for log probabilities."""
    if dialect is Dialect.PROMPT_LOGPROBS:
        return {"prompt_logprobs": top, "max_tokens": 1, "return_token_ids": True}
    return {"echo": True, "logprobs": top, "max_tokens": num_output}


def scored(answer: Mapping[str, Any], dialect: Dialect, ids: Sequence[int] | None) -> Scored:
    """`ids` are the prompt's, None for a prompt of text. Raises Unexpected."""
    try:
        choice = answer["choices"][0]
        if dialect is Dialect.PROMPT_LOGPROBS:
            return _by_id(choice, ids)
        return _by_name(choice, answer, ids)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Unexpected(str(error)) from error


def _by_id(choice: Mapping[str, Any], ids: Sequence[int] | None) -> Scored:
    entries = choice["prompt_logprobs"]
    known = choice["prompt_token_ids"] if ids is None else ids
    if len(entries) != len(known):
        raise Unexpected(f"{len(entries)} log probabilities for {len(known)} tokens")
    names = []
    positions: list[Position | None] = []
    for token, entry in zip(known, entries, strict=True):
        names.append("" if entry is None else str(entry[str(token)].get("decoded_token")))
        if entry is None:
            positions.append(None)
            continue
        top: dict[Hashable, float] = {
            int(key): _finite(value["logprob"]) for key, value in entry.items()
        }
        positions.append(Position(token, top))
    return Scored(positions, names)


def _by_name(
    choice: Mapping[str, Any], answer: Mapping[str, Any], ids: Sequence[int] | None
) -> Scored:
    logprobs = choice["logprobs"]
    num = len(ids) if ids is not None else int(answer["usage"]["prompt_tokens"])
    if len(logprobs["tokens"]) > num + 1:
        raise Unexpected("the tokens are not the prompt's: `echo` is not known here")
    names, values = logprobs["tokens"][:num], logprobs["token_logprobs"][:num]
    tops = (logprobs.get("top_logprobs") or [None] * num)[:num]
    if not len(names) == len(values) == len(tops) == num:
        raise Unexpected(f"{len(values)} log probabilities for {num} tokens")
    positions = [
        None if value is None else _named(name, _finite(value), top or {})
        for name, value, top in zip(names, values, tops, strict=True)
    ]
    return Scored(positions, [str(name) for name in names])


def _named(name: str, value: float, top: Mapping[str, float]) -> Position:
    others: dict[Hashable, float] = {
        key: _finite(other) for key, other in top.items() if key != name and BROKEN not in key
    }
    return Position(FOLLOWED, others | {FOLLOWED: value})


def _finite(value: float | None) -> float:
    return LOGPROB_MIN if value is None else max(LOGPROB_MIN, float(value))


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a server adds to a prompt; `ids` and `names` of its tokens where it tells them."""

    text: str
    ids: Sequence[int] | None = None
    names: Sequence[str] | None = None


def continuation(answer: Mapping[str, Any]) -> Continuation:
    """Raises Unexpected when there is none."""
    try:
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        names = (choice.get("logprobs") or {}).get("tokens")
        return Continuation(
            str(choice["text"]),
            None if ids is None else [int(token) for token in ids],
            None if names is None else [str(name) for name in names],
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Unexpected(str(error)) from error

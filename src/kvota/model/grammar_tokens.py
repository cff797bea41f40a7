"""Special tokens in grammars: never the reading of a text, always reachable by their name.

A tokenizer reads the text of a special token ("<|im_end|>") as that token, and llguidance follows
the tokenizer where only one text can come next. A choice, a constant or a property's name that
holds such a text would end the answer or fit no grammar. So llguidance is given the vocabulary
with every special token under a name that no text has, and writes such texts like any other.

A client's Lark grammar may still say `<|im_end|>`, outside of quotes, for the token itself.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

NAME_MARK = "\ufdd0"  # Unicode keeps it out of texts for good: a noncharacter
# What may hold `<…>` as text comes first. Where an end is missing it reaches as far as it can, and
# nothing is read twice: the time to search a text grows with its length, whatever it holds.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])++/?|(?P<special><[^<>\[\]\s]++>)'
)


def hide_specials(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """The tokenizer with its special tokens renamed, and their ids by the names they had."""
    parts = json.loads(tokenizer_json)
    specials = [token for token in parts.get("added_tokens") or () if token["special"]]
    ids = {token["content"]: int(token["id"]) for token in specials}
    for token in specials:
        token["content"] = _hidden(token["content"], ids)
    model = parts.get("model", {})
    if "vocab" in model:
        model["vocab"] = _renamed(model["vocab"], ids)
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _hidden(model["unk_token"], ids)
    parts["post_processor"] = None  # it frames whole texts, by names that are gone
    return json.dumps(parts, ensure_ascii=False), ids


def name_specials(lark: str, ids: Mapping[str, int]) -> str:
    """A client's Lark grammar with the special tokens it names written as ids."""

    def written(match: re.Match[str]) -> str:
        special = match["special"]
        return f"<[{ids[special]}]>" if special in ids else match[0]

    return _LARK_TOKEN.sub(written, lark)


def _renamed(vocab: Any, ids: Mapping[str, int]) -> Any:
    """Ids by name, or pairs of name and score in the order of ids (Unigram)."""
    if isinstance(vocab, dict):
        return {_hidden(name, ids): id_ for name, id_ in vocab.items()}
    return [[_hidden(name, ids), score] for name, score in vocab]


def _hidden(name: str, ids: Mapping[str, int]) -> str:
    return NAME_MARK + name if name in ids else name

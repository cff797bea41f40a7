"""A tokenizer from a directory in Hugging Face's layout, or an OpenVINO IR exported beside one.

tokenizer.json             the vocabulary and how it merges; the only file that must exist
tokenizer_config.json      names of the special tokens, chat template
special_tokens_map.json    the same names, where the config leaves them out
chat_template.jinja        newer exports keep the template here
generation_config.json     every id that ends a turn; config.json where it is missing
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from kvota.core.errors import ModelError
from kvota.model.tokenizer_parts import TokenizerParts

# Only these classes rebuild what frames a prompt from add_bos_token and add_eos_token; for all
# others tokenizer.json alone decides.
_FRAMED_BY_CONFIG = ("Llama", "CodeLlama", "Gemma", "Cohere")


def read_hf_tokenizer(directory: Path) -> TokenizerParts:
    """Read the directory's tokenizer. Raises ModelError naming the file that is missing or bad."""
    core = _load_core(directory / "tokenizer.json")
    names = _SpecialTokens.read(directory, core)
    prefix, suffix = _frame(core)
    if names.config_class.startswith(_FRAMED_BY_CONFIG):
        prefix = _override(prefix, wanted=names.config.get("add_bos_token"), token=names.bos)
        suffix = _override(suffix, wanted=names.config.get("add_eos_token"), token=names.eos)
    return TokenizerParts(
        core=core,
        prefix=prefix,
        suffix=suffix,
        bos_id=names.bos,
        eos_id=names.eos,
        pad_id=names.token_id("pad_token"),
        eos_ids=frozenset(_turn_ends(directory, names.eos)),
        chat_template=_chat_template(directory, names.config),
    )


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    config: Mapping[str, Any]
    fallback: Mapping[str, Any]
    core: tokenizers.Tokenizer

    @classmethod
    def read(cls, directory: Path, core: tokenizers.Tokenizer) -> "_SpecialTokens":
        config = _read_json(directory / "tokenizer_config.json")
        return cls(config, _read_json(directory / "special_tokens_map.json"), core)

    @property
    def config_class(self) -> str:
        return str(self.config.get("tokenizer_class") or "")

    @property
    def bos(self) -> int | None:
        return self.token_id("bos_token")

    @property
    def eos(self) -> int | None:
        return self.token_id("eos_token")

    def token_id(self, role: str) -> int | None:
        """The id of a role, which a file spells as a text or as an AddedToken object."""
        token = self.config.get(role) or self.fallback.get(role)
        if isinstance(token, Mapping):
            token = token.get("content")
        return self.core.token_to_id(token) if isinstance(token, str) else None


def _load_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path} is missing. kvota needs the fast tokenizer: save it beside the model "
            "with AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception, for bad files only
        raise ModelError(f"{path} cannot be read: {error}.") from error
    core.no_truncation()  # a training-time limit may be stored; ours is max_model_len
    core.no_padding()
    return core


def _frame(core: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the stored post-processor puts before and after a text."""
    bare = core.encode("a", add_special_tokens=False).ids
    framed = core.encode("a", add_special_tokens=True).ids
    num_added = len(framed) - len(bare)
    start = next(at for at in range(num_added + 1) if framed[at : at + len(bare)] == bare)
    return tuple(framed[:start]), tuple(framed[start + len(bare) :])


def _override(stored: tuple[int, ...], *, wanted: Any, token: int | None) -> tuple[int, ...]:
    if not isinstance(wanted, bool):
        return stored
    return (token,) if wanted and token is not None else ()


def _turn_ends(directory: Path, eos: int | None) -> Iterator[int]:
    if eos is not None:
        yield eos
    generation = _read_json(directory / "generation_config.json")
    listed = generation.get("eos_token_id")
    if listed is None:
        listed = _read_json(directory / "config.json").get("eos_token_id")
    yield from [listed] if isinstance(listed, int) else listed or ()


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template as text; of several named ones, the one called default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content

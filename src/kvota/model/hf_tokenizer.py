"""A tokenizer from a directory in Hugging Face's layout, or an OpenVINO IR exported beside one.

tokenizer.json             the vocabulary and how it merges; the only file that must exist
tokenizer_config.json      names of the special tokens, chat template
special_tokens_map.json    the same names, where the config leaves them out
chat_template.jinja        newer exports keep the template here, and further ones, by name,
                           in additional_chat_templates/
generation_config.json     every id that ends a turn; config.json where it is missing
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.model.hf_config import read_json
from kvota.model.tokenizer_parts import TokenizerParts

# Only these classes rebuild what frames a prompt from add_bos_token and add_eos_token; for all
# others tokenizer.json alone decides.
_FRAMED_BY_CONFIG = ("Llama", "CodeLlama", "Gemma", "Cohere")
_MORE_TEMPLATES = "additional_chat_templates"
_PREFIXED = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_ID_END = 2**32  # the tokenizer library takes no higher id
_ID_MAX = 2**22  # sixteen times the largest vocabulary there is; every id up to it takes a place


def read_hf_tokenizer(directory: Path) -> TokenizerParts:
    """Read the directory's tokenizer. Raises ModelError naming the file that is missing or bad."""
    core = _load_core(directory / "tokenizer.json")
    names = _SpecialTokens.read(directory, core)
    prefix, suffix = _frame(core, directory / "tokenizer.json")
    if names.config_class.startswith(_FRAMED_BY_CONFIG):
        prefix = _override(prefix, wanted=names.config.get("add_bos_token"), token=names.bos)
        suffix = _override(suffix, wanted=names.config.get("add_eos_token"), token=names.eos)
    templates = _chat_templates(directory, names.config)
    ends = {names.eos, *_turn_ends(directory)}
    return TokenizerParts(
        core=core,
        prefix=prefix,
        suffix=suffix,
        bos_id=names.bos,
        eos_id=names.eos,
        pad_id=names.token_id("pad_token"),
        eos_ids=frozenset(i for i in ends if i is not None and core.id_to_token(i) is not None),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
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
    _check_merges(path)
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception, and panics of its own
        if not _is_the_librarys(error):
            raise
        raise ModelError(f"{path} cannot be read: {error}.") from error
    _check_ids(core, path)
    core.no_truncation()  # a training-time limit may be stored; ours is max_model_len
    core.no_padding()
    return core


def _check_merges(path: Path) -> None:
    """Refuse merges that lack the prefix of their model: the library cuts it off unseen.

    Inside a character, or beyond a token's end, that ends the process.
    """
    try:
        text = path.read_bytes()
        model = json.loads(text)["model"] if _PREFIXED.search(text) else {}
        prefix, merges = model["continuing_subword_prefix"], model["merges"]
        rights = [
            merge.partition(" ")[2] if isinstance(merge, str) else merge[1] for merge in merges
        ]
        is_sound = all(right.startswith(prefix) for right in rights)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return  # no merges, no prefix, or something that the library has words for
    if not is_sound:
        raise ModelError(
            f"{path}: its continuing_subword_prefix is {prefix[:100]!r}, but not all of its merges "
            "have it. Fetch it again."
        )


def _check_ids(core: tokenizers.Tokenizer, path: Path) -> None:
    vocabulary: dict[str, int] = core.get_vocab(with_added_tokens=True)
    token = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if token is not None and vocabulary[token] > _ID_MAX:
        raise ModelError(
            f"{path}: gives the token {token[:100]!r} the id {vocabulary[token]}; no vocabulary "
            f"has ids beyond {_ID_MAX}. Fetch it again."
        )


def _frame(core: tokenizers.Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the stored post-processor puts before and after a text."""
    try:
        bare = core.encode("a", add_special_tokens=False).ids
        framed = core.encode("a", add_special_tokens=True).ids
    except BaseException as error:  # the library raises bare Exception, and panics of its own
        if not _is_the_librarys(error):
            raise
        raise ModelError(f"{path} cannot encode a text: {error}. Fetch it again.") from error
    num_added = len(framed) - len(bare)
    starts = [at for at in range(num_added + 1) if framed[at : at + len(bare)] == bare]
    if not starts:
        raise ModelError(f"{path}: its post_processor leaves out the text. Fetch it again.")
    prefix, suffix = framed[: starts[0]], framed[starts[0] + len(bare) :]
    for token_id in (*prefix, *suffix):
        if core.id_to_token(token_id) is None:
            raise ModelError(
                f"{path}: its post_processor adds the id {token_id}, which is no token's. "
                "Fetch it again."
            )
    return tuple(prefix), tuple(suffix)


def _is_the_librarys(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _override(stored: tuple[int, ...], *, wanted: Any, token: int | None) -> tuple[int, ...]:
    if not isinstance(wanted, bool):
        return stored
    return (token,) if wanted and token is not None else ()


def _turn_ends(directory: Path) -> list[int]:
    """The ids that the model's settings end a turn with; some of them may be no token's."""
    for name in ("generation_config.json", "config.json"):
        settings = Settings(_read_json(directory / name), str(directory / name))
        stated = settings.get("eos_token_id")
        if stated is None:
            continue
        listed = stated if isinstance(stated, list) else [stated]
        if not all(type(token_id) is int for token_id in listed):
            raise settings.wrong("eos_token_id", "a token id or a list of them")
        return [token_id for token_id in listed if 0 <= token_id < _ID_END]
    return []


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name, "default" the usual one. A file wins over the configuration."""
    templates = _configured_templates(directory, config)
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in (directory / _MORE_TEMPLATES).glob("*.jinja")}
    for name, path in files.items():
        if path.is_file():
            templates[name] = _read_text(path)
    return templates


def _configured_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stated = config.get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in stated or ()}
    except (TypeError, KeyError):
        path = directory / "tokenizer_config.json"
        raise ModelError(
            f"{path}: chat_template must be a text, or a list of objects with name and template."
        ) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text.") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}

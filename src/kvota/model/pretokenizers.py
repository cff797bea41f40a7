"""How a byte-level BPE vocabulary cuts text into words before merging: one row per model family.

GGUF files name the family in `tokenizer.ggml.pre`. The patterns are those of the families' own
tokenizer.json, which llama.cpp's `src/llama-vocab.cpp` records beside its adapted ones. Each
pattern of a row cuts what the one before has left; matches and gaps both become words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from kvota.core.errors import UnsupportedModel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = r"[^\r\n\p{L}\p{N}]?"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ"
    r"\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_CJK = r"[一-龥\x{0800}-一가-\x{D7FF}]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` in order. `ignore_merges`: a word that is a token stays whole."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False  # when the file does not say
    composes: bool = False  # Unicode NFC first

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(list(self._steps()))

    def _steps(self) -> Iterator[pre_tokenizers.PreTokenizer]:
        for pattern in self.patterns:
            yield pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. Raises UnsupportedModel with the names that exist."""
    row = _ROWS.get(name)
    if row is None:
        raise UnsupportedModel(
            f"The pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported. "
            f"Supported: {', '.join(sorted(_ROWS))}."
        )
    return row


def _rows() -> dict[str, PreTokenizer]:
    rows = {}
    for names, row in _FAMILIES:
        rows.update(dict.fromkeys(names.split(), row))
    return rows


_FAMILIES = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 mpt olmo jais exaone4 gigachat trillion granite-docling mellum",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(
            (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, adds_bos=True
        ),
    ),
    (
        "dbrx smaug-bpe glm4 chatglm-bpe",
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",)),
    ),
    ("qwen2 megrez", PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}",), composes=True)),
    (
        "deepseek-r1-qwen stablelm2 hunyuan solar-open",
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}",)),
    ),
    (
        "deepseek-llm",
        # `\s+$` in the original. The look-behind finds the same match without trying every
        # start inside a long run of spaces, which takes quadratic time.
        PreTokenizer(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
                r"(?<!\s)\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    (
        "deepseek-v3",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                r"[一-龥\x{3040}-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "tekken",
        PreTokenizer(
            (
                rf"{_CASED_WORD}{_UPPER}*{_LOWER}+|{_CASED_WORD}{_UPPER}+{_LOWER}*"
                rf"|\p{{N}}|{_REST_WITH_SLASH}",
            ),
            ignore_merges=True,
            adds_bos=True,
        ),
    ),
    (
        "gpt-4o llama4",
        PreTokenizer(
            (
                rf"{_CASED_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?"
                rf"|{_CASED_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
                rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
            )
        ),
    ),
)
_ROWS: Mapping[str, PreTokenizer] = MappingProxyType(_rows())

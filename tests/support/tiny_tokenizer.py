"""A complete byte-level BPE tokenizer of 300 tokens, built in memory.

It has what breaks code that works on whole words: every byte alone, merges that span JSON
punctuation, characters cut in half (`好` is three tokens), and special tokens.

    0 .. 2      special: <|endoftext|>, <|im_start|>, <|im_end|> (the ids SmolLM2 uses)
    3 .. 258    the 256 single bytes
    259 .. 299  merges
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ENDOFTEXT_ID = 0
IM_START_ID = 1
IM_END_ID = 2
FIRST_BYTE_ID = 3
VOCAB_SIZE = 300

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Each piece is merged from the left, so its prefixes are tokens too ("th" before "the").
MERGED_PIECES = (
    *('{"', '":', '",', '"}', "},", "[{", "}]", "\n\n", "  ", '\\"'),
    *(" the", "the", " and", "ing", " hello", "world", "true", "false", "null", "12", "é"),
)


def tiny_tokenizer() -> Tokenizer:
    """A fresh tokenizer; `decode(encode(text))` is `text` for any text without special tokens."""
    vocab, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return tokenizer


def token_bytes() -> list[bytes]:
    """What each token adds to the text, by id; special tokens add nothing."""
    byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
    ordinary = [bytes(byte_of[letter] for letter in token) for token in list(_vocabulary()[0])[3:]]
    return [b""] * len(SPECIAL_TOKENS) + ordinary


def byte_ids(text: str) -> list[int]:
    """The ids of `text` spelled byte by byte, without any merge."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    letters = _byte_letters()
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    merges = []
    for piece in MERGED_PIECES:
        left, *rest = [letters[byte] for byte in piece.encode()]
        for right in rest:
            if left + right not in vocab:
                merges.append((left, right))
                vocab[left + right] = len(vocab)
            left += right
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    return vocab, merges


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte: itself where printable, else the next above 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]

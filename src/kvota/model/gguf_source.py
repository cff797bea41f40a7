"""A GGUF file as a source of weights, under Hugging Face's names and in its layout."""

from pathlib import Path
from typing import Any

from kvota.model.gguf_header import read_header


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The file's keys as plain Python values. Works on files whose weights are missing or damaged.

    Raises ModelError when the file is no GGUF file or its header is damaged.
    """
    return read_header(path).metadata

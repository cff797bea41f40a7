"""A directory in which anything may be wrong opens, or is refused in a sentence that names it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvota.core.errors import ModelError
from kvota.model.naming import naming
from kvota.model.source import open_source
from kvota.model.tokenizer import Tokenizer
from tests.support.tiny_models import FAMILIES, write_safetensors

MESSAGE_CHARS_MAX = 2000
JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
# What a hand, a tool or a flipped bit leaves where something else belongs.
NUMBERS = (0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**400)
OTHERS: tuple[Any, ...] = (None, True, "", "x", "\0", "../x", [], [1], [None], ["a"], {}, {"a": 1})
WRONG = st.sampled_from((*NUMBERS, *OTHERS, {"rope_type": "yarn"}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory a family, in two shards."""
    folder = tmp_path_factory.mktemp("whole")
    for family in FAMILIES:
        write_safetensors(folder / family, family, shards=2)
    return folder


def assert_opens_or_is_refused(model: Path) -> None:
    """With everything that is read before the weights."""
    complaint = complaint_about(model)
    if complaint is not None:
        assert complaint.startswith(str(model))
        assert len(complaint) < MESSAGE_CHARS_MAX


def complaint_about(model: Path) -> str | None:
    try:
        with naming(model):
            open_source(model)
            Tokenizer.from_directory(model)
    except ModelError as error:
        return error.message
    return None


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value inside, by keys and indices; of long lists the first few."""
    inner = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))[:8]
    for key, one in inner:
        yield (*way, key)
        yield from places(one, (*way, key))


def replaced(content: Any, way: tuple[Any, ...], wrong: Any) -> Any:
    if not way:
        return wrong
    changed = dict(content) if isinstance(content, dict) else list(content)
    changed[way[0]] = replaced(content[way[0]], way[1:], wrong)
    return changed


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from(FAMILIES), name=st.sampled_from(JSON_FILES), chosen=st.data())
def test_a_wrong_value_anywhere_in_the_settings_is_a_sentence_or_nothing(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, family: str, name: str, chosen: Any
) -> None:
    model = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole / family, model, dirs_exist_ok=True)
    content = json.loads((model / name).read_text())
    way = chosen.draw(st.sampled_from(list(places(content))))
    (model / name).write_text(json.dumps(replaced(content, way, chosen.draw(WRONG))))
    assert_opens_or_is_refused(model)
    shutil.rmtree(model)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from(FAMILIES), chosen=st.data())
def test_a_wrong_value_anywhere_in_the_list_of_tensors_is_a_sentence_or_nothing(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, family: str, chosen: Any
) -> None:
    model = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole / family, model, dirs_exist_ok=True)
    shard = model / "model-00001-of-00002.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    content = json.loads(raw[8 : 8 + length])
    way = chosen.draw(st.sampled_from(list(places(content))))
    text = json.dumps(replaced(content, way, chosen.draw(WRONG))).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert_opens_or_is_refused(model)
    shutil.rmtree(model)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from(FAMILIES), chosen=st.data())
def test_a_file_that_ends_early_is_a_sentence_or_nothing(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, family: str, chosen: Any
) -> None:
    model = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole / family, model, dirs_exist_ok=True)
    file = chosen.draw(st.sampled_from(sorted(model.iterdir())))
    raw = file.read_bytes()
    file.write_bytes(raw[: chosen.draw(st.integers(0, len(raw)))])
    assert_opens_or_is_refused(model)
    shutil.rmtree(model)

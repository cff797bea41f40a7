import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from kvota.core.errors import ModelError
from kvota.model.hf_tokenizer import read_hf_tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from tests.support.tiny_models import write_tokenizer
from tests.support.tiny_tokenizer import ENDOFTEXT_ID, IM_END_ID, IM_START_ID, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def read_with(folder: Path, **config: Any) -> TokenizerParts:
    edit(folder / "tokenizer_config.json", **config)
    return read_hf_tokenizer(folder)


A: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
B: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}
FRAME: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, A],
    "pair": [A, B],
}
ADDED = {"id": "x", "ids": [400_000_000], "tokens": ["x"]}
BAD_MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def test_roles_come_from_the_configuration(folder: Path) -> None:
    parts = read_hf_tokenizer(folder)
    assert (parts.bos_id, parts.eos_id, parts.pad_id) == (IM_START_ID, IM_END_ID, None)
    assert (parts.prefix, parts.suffix) == ((), ())


def test_a_role_may_be_an_object_with_its_text(folder: Path) -> None:
    parts = read_with(folder, pad_token={"content": "<|endoftext|>", "lstrip": False})
    assert parts.pad_id == ENDOFTEXT_ID


def test_a_role_that_no_token_has_is_absent(folder: Path) -> None:
    assert read_with(folder, pad_token="<pad>").pad_id is None


def test_roles_missing_from_the_configuration_come_from_the_map(folder: Path) -> None:
    edit(folder / "special_tokens_map.json", eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    parts = read_with(folder, eos_token=None)
    assert (parts.eos_id, parts.bos_id) == (ENDOFTEXT_ID, IM_START_ID)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0, 2]}, {"eos_token_id": 5}, {0, 2}),
        ({"eos_token_id": 0}, {}, {0, 2}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {2, 5}),
        ({}, {"eos_token_id": [5, 6]}, {2, 5, 6}),
        ({"eos_token_id": [0, -1, 300, 2**40]}, {}, {0, 2}),  # no token has these: none can come
        ({}, {}, {2}),
    ],
)
def test_every_id_that_ends_a_turn_is_collected(
    folder: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    assert read_hf_tokenizer(folder).eos_ids == expected


@pytest.mark.parametrize("prefix", ["x", "../x", "a" * 60])
@pytest.mark.parametrize("is_paired", [True, False])
def test_merges_that_lack_the_prefix_of_their_model_are_refused(
    folder: Path, prefix: str, is_paired: bool
) -> None:
    """The tokenizer library would end the process, or raise what no `except` is for."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    model = content["model"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = pairs if is_paired else [" ".join(pair) for pair in pairs]
    model["continuing_subword_prefix"] = prefix
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its continuing_subword_prefix is"):
        read_hf_tokenizer(folder)


def test_merges_that_have_the_prefix_of_their_model_are_read(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {
        "continuing_subword_prefix": "##",
        "vocab": {"a": 0, "##b": 1, "ab": 2, "<|im_start|>": 3, "<|im_end|>": 4},
        "merges": [["a", "##b"]],
    }
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    assert read_hf_tokenizer(folder).core.token_to_id("ab") == 2


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_hf_tokenizer(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"version": ')
    with pytest.raises(ModelError, match=name):
        read_hf_tokenizer(folder)


def test_a_file_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json: holds a list, not an object"):
        read_hf_tokenizer(folder)


def test_the_other_files_may_be_missing(folder: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    parts = read_hf_tokenizer(folder)
    assert (parts.bos_id, parts.eos_ids, parts.chat_template) == (None, frozenset(), None)


def test_the_stored_frame_is_found(folder: Path) -> None:
    core = tiny_tokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", IM_START_ID), ("<|im_end|>", IM_END_ID)],
    )
    core.save(str(folder / "tokenizer.json"))
    parts = read_hf_tokenizer(folder)
    assert (parts.prefix, parts.suffix) == ((IM_START_ID,), (IM_END_ID,))


def test_only_some_classes_frame_by_configuration(folder: Path) -> None:
    named = read_with(folder, tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    other = read_with(folder, tokenizer_class="Qwen2Tokenizer", add_bos_token=True)
    assert (named.prefix, other.prefix) == ((IM_START_ID,), ())


def test_a_stored_length_limit_is_not_ours(folder: Path) -> None:
    core = tiny_tokenizer()
    core.enable_truncation(2)
    core.enable_padding(length=8)
    core.save(str(folder / "tokenizer.json"))
    assert len(read_hf_tokenizer(folder).core.encode("abcdefghijkl").ids) == 12


def test_of_several_chat_templates_the_default_is_taken(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_with(folder, chat_template=several).chat_template == "D"
    assert read_with(folder, chat_template=several[:1]).chat_template is None


def test_the_template_for_tools_is_kept_beside_the_default(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_with(folder, chat_template=several).tool_template == "T"
    assert read_with(folder, chat_template="D").tool_template is None
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("F")
    parts = read_with(folder, chat_template=several)
    assert (parts.chat_template, parts.tool_template) == ("D", "F")


def test_a_template_file_wins_over_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("é{{ messages }}", encoding="utf-8")
    assert read_hf_tokenizer(folder).chat_template == "é{{ messages }}"


@pytest.mark.parametrize("wrong", [1.5, "2", True, {"id": 2}, [2, "3"], [[2]], [None]])
def test_an_end_that_is_no_token_id_is_named(folder: Path, wrong: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=wrong)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        read_hf_tokenizer(folder)


@pytest.mark.parametrize("wrong", [[None], [{"name": "default"}], [{"template": "T"}], [3]])
def test_a_list_of_templates_that_is_none_is_named(folder: Path, wrong: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        read_with(folder, chat_template=wrong)


def test_a_template_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        read_hf_tokenizer(folder)


def test_a_configuration_that_nests_without_end_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        read_hf_tokenizer(folder)


def test_an_id_far_beyond_any_vocabulary_is_named_and_takes_no_memory(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Ġthe"] = 2**31
    path.write_text(json.dumps(content))
    with pytest.raises(
        ModelError, match=r"tokenizer\.json: gives the token 'Ġthe' the id 2147483648"
    ):
        read_hf_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"post_processor": FRAME | {"special_tokens": {"x": ADDED}}}, "adds the id 400000000"),
        ({"post_processor": FRAME | {"single": [B], "special_tokens": {}}}, "cannot|leaves out"),
        ({"normalizer": BAD_MAP}, "cannot"),
        ({"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}}, "cannot encode"),
    ],
)
def test_a_tokenizer_that_cannot_encode_is_named(
    folder: Path, change: dict[str, Any], words: str
) -> None:
    """The library raises bare exceptions and panics for these."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=rf"tokenizer\.json.*({words})"):
        read_hf_tokenizer(folder)

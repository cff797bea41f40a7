"""OpenVINO exports: the logits of real ones, and what a broken or foreign one is told.

tests/golden/tiny_ir holds two exports by optimum-intel and Hugging Face's logits for them
(scripts/golden_ir.py).
"""

import errno
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
import pytest
from openvino import Type

from kvota.core.errors import ConfigError, ModelError, UnsupportedModel
from kvota.core.plan import Chunk, Draw
from kvota.model.compiled import KvDtype, compile_model
from kvota.model.executor import OpenVinoExecutor
from kvota.model.ir import load_ir
from kvota.model.sampler import Sampler
from kvota.model.weights import WeightFormat
from tests.support.model_runs import BLOCK_TABLE, GREEDY, NUM_BLOCKS, all_logits

TINY_IR = Path(__file__).parents[1] / "golden" / "tiny_ir"
ORACLE: dict[str, Any] = json.loads((TINY_IR / "oracle.json").read_text(encoding="utf-8"))
TOKENS: list[int] = ORACLE["tokens"]
EXPORTS = ("mistral_f16", "qwen3_int8")
TOLERANCE = 1e-4  # of logits with a standard deviation near 1; measured 2e-5

Floats = npt.NDArray[np.float32]


def executor_of(directory: Path) -> OpenVinoExecutor:
    paged = load_ir(directory)
    compiled = compile_model(paged, kv_dtype=KvDtype.F32, num_threads=1)
    return compiled.executor(NUM_BLOCKS, Sampler(paged.vocab_size))


def oracle(name: str) -> Floats:
    return np.array(ORACLE["logits"][name], np.float32)


def edited_export(
    target: Path,
    edit: Callable[[ov.Output], ov.Node],
    *,
    inputs: Sequence[ov.Node] = (),
    sinks: Sequence[ov.Node] = (),
) -> Path:
    """A copy of the int8 export whose logits go through `edit`, which may use more inputs."""
    model = ov.Core().read_model(TINY_IR / "qwen3_int8" / "openvino_model.xml")
    model.add_parameters(list(inputs))
    model.add_sinks(list(sinks))
    result = model.get_results()[0]
    node = edit(result.input_value(0))
    result.input_value(0).set_names(set())
    node.output(0).set_names({"logits"})
    result.input(0).replace_source_output(node.output(0))
    return saved(model, target)


def saved(model: ov.Model, target: Path) -> Path:
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(TINY_IR / "qwen3_int8" / "config.json", target)
    return target


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A sound export, to be broken."""
    return Path(shutil.copytree(TINY_IR / "qwen3_int8", tmp_path / "export"))


@pytest.mark.parametrize("chunk_max", [80, 7])
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_gives_hugging_faces_logits(name: str, chunk_max: int) -> None:
    logits = all_logits(executor_of(TINY_IR / name), TOKENS, chunk_max)
    np.testing.assert_allclose(logits[ORACLE["rows"]], oracle(name), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", EXPORTS)
def test_only_sampled_positions_reach_the_head(name: str) -> None:
    executor = executor_of(TINY_IR / name)
    ends = [row + 1 for row in ORACLE["rows"][:4]]
    tables = [BLOCK_TABLE[2 * number : 2 * number + 2] for number in range(len(ends))]
    chunks = [
        Chunk(number, TOKENS[:end], 0, table, (Draw(GREEDY, 0, TOKENS[:end], end),))
        for number, (end, table) in enumerate(zip(ends, tables, strict=True))
    ]
    logits = executor.logits(chunks)
    np.testing.assert_allclose(logits, oracle(name)[:4], rtol=0, atol=TOLERANCE)


def test_the_head_multiplies_only_rows_that_were_gathered() -> None:
    model = load_ir(TINY_IR / "qwen3_int8").model
    assert after_sampled_tokens(model) == ["Gather", "MatMul"]


def after_sampled_tokens(model: ov.Model) -> list[str]:
    """The two operations that follow the input `sampled_tokens_indices`."""
    (gathering,) = model.input("sampled_tokens_indices").get_target_inputs()
    (multiplying,) = gathering.get_node().output(0).get_target_inputs()
    return [str(port.get_node().get_type_name()) for port in (gathering, multiplying)]


@pytest.mark.parametrize("name", EXPORTS)
def test_sizes_come_from_graph_and_config(name: str) -> None:
    paged = load_ir(TINY_IR / name)
    assert (paged.num_layers, paged.vocab_size, paged.max_position) == (2, 256, 512)


def test_weights_stay_compressed() -> None:
    operations = load_ir(TINY_IR / "qwen3_int8").model.get_ops()
    stored = [op for op in operations if op.get_type_name() == "Constant"]
    num_bytes = sum(op.get_byte_size() for op in stored if op.get_element_type() == Type.u8)
    assert num_bytes >= 256 * 32 + 2 * (3 * 32 * 48)  # the embedding and both MLPs


def test_a_biased_and_capped_head_is_followed_to_its_product(tmp_path: Path) -> None:
    bias = np.linspace(-1, 1, 256, dtype=np.float32)

    def capped(logits: ov.Output) -> ov.Node:
        biased = ops.add(logits, ops.constant(bias))
        cap = ops.constant(np.float32(2.0))
        return ops.multiply(ops.tanh(ops.divide(biased, cap)), cap)

    path = edited_export(tmp_path, capped)
    assert after_sampled_tokens(load_ir(path).model) == ["Gather", "MatMul"]
    logits = all_logits(executor_of(path), TOKENS, 80)[ORACLE["rows"]]
    expected = 2 * np.tanh((oracle("qwen3_int8") + bias) / 2)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_an_unknown_head_gives_the_same_rows(tmp_path: Path) -> None:
    path = edited_export(tmp_path, ops.relu)
    logits = all_logits(executor_of(path), TOKENS, 33)[ORACLE["rows"]]
    expected = np.maximum(oracle("qwen3_int8"), 0)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_a_weight_format_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match=r"weights = int8 .*Leave weights at auto"):
        load_ir(TINY_IR / "qwen3_int8", WeightFormat.INT8)


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_model.bin"])
def test_a_missing_file_is_named(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load_ir(broken)


@pytest.mark.parametrize("num_bytes", [0, 1000, 30_000])
def test_weights_that_stop_early_are_refused(broken: Path, num_bytes: int) -> None:
    weights = broken / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=rf"Incorrect weights in bin file! .* {num_bytes} bytes"):
        load_ir(broken)


@pytest.mark.parametrize("num_chars", [0, 50_000])
def test_a_graph_that_stops_early_is_refused(broken: Path, num_chars: int) -> None:
    graph = broken / "openvino_model.xml"
    graph.write_text(graph.read_text(encoding="utf-8")[:num_chars], encoding="utf-8")
    with pytest.raises(ModelError, match="OpenVINO cannot read this model"):
        load_ir(broken)


def test_a_graph_with_bytes_that_are_no_text_is_refused(broken: Path) -> None:
    """OpenVINO quotes them in its complaint, which then is no text either."""
    graph = broken / "openvino_model.xml"
    graph.write_bytes(graph.read_bytes().replace(b"<dim>-1</dim>", b"<dim>-\xb1</dim>", 1))
    with pytest.raises(ModelError, match=rf"^{re.escape(str(broken))}: .*no UTF-8"):
        load_ir(broken)


def test_a_file_that_cannot_be_opened_is_named(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(path: Path, *modes: Any, **more: Any) -> Any:
        if path.name == "openvino_model.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *modes, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"openvino_model\.bin: cannot be read: Permission denied"):
        load_ir(broken)


def test_a_missing_config_is_named(broken: Path) -> None:
    (broken / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_ir(broken)


def test_a_config_without_a_context_length_is_refused(broken: Path) -> None:
    (broken / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="max_position_embeddings is missing"):
        load_ir(broken)


def test_a_decoder_of_several_parts_has_its_settings_in_a_table(broken: Path) -> None:
    config = {"text_config": {"max_position_embeddings": 77}, "max_position_embeddings": 5}
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_ir(broken).max_position == 77


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "longrope"}, "max_position_embeddings": 512},
        {"rope_scaling": {"type": "su"}, "max_position_embeddings": 512},
    ],
)
def test_rotation_that_depends_on_the_batch_is_refused(broken: Path, config: object) -> None:
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="longrope"):
        load_ir(broken)


def test_an_export_without_past_is_told_how_to_export(tmp_path: Path) -> None:
    ids = ops.parameter([-1, -1], Type.i64, "input_ids")
    logits = ops.unsqueeze(ops.convert(ids, Type.f32), ops.constant(np.int64(2)))
    logits.output(0).set_names({"logits"})
    path = saved(ov.Model([logits], [ids], "stateless"), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"exported without past.*text-generation-with-past"):
        load_ir(path)


def test_a_state_without_attention_is_refused(tmp_path: Path) -> None:
    path = saved(recurrent_model(), tmp_path)
    with pytest.raises(UnsupportedModel, match="cannot page this model's attention"):
        load_ir(path)


def recurrent_model() -> ov.Model:
    """Sums its tokens in a state, as far from attention as a decoder can be."""
    ids = ops.parameter([-1, -1], Type.i64, "input_ids")
    ids.output(0).set_names({"input_ids"})
    tokens = ops.convert(ids, Type.f32)
    before = ops.read_value(ops.constant(np.zeros((1, 1), np.float32)), "sum", Type.f32, [1, 1])
    after = ops.add(before, ops.reduce_sum(tokens, ops.constant(np.array([1])), True))
    logits = ops.unsqueeze(ops.add(tokens, after), ops.constant(np.int64(2)))
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], [ops.assign(after, "sum")], [ids], "recurrent")


def test_an_input_besides_tokens_is_named(tmp_path: Path) -> None:
    speaker = ops.parameter([1], Type.f32, "speaker")
    speaker.output(0).set_names({"speaker"})
    path = edited_export(tmp_path, lambda logits: ops.add(logits, speaker), inputs=[speaker])
    with pytest.raises(UnsupportedModel, match=r"inputs \['speaker'\]"):
        load_ir(path)


def test_a_state_beside_attention_is_refused(tmp_path: Path) -> None:
    before = ops.read_value(ops.constant(np.zeros(1, np.float32)), "calls", Type.f32, [1])
    after = ops.assign(ops.add(before, ops.constant(np.float32(1))), "calls")
    path = edited_export(tmp_path, lambda logits: ops.add(logits, before), sinks=[after])
    with pytest.raises(UnsupportedModel, match="1 states of another kind"):
        load_ir(path)


def test_an_export_for_another_task_is_refused(tmp_path: Path) -> None:
    path = edited_export(tmp_path, ops.relu)
    text = (path / "openvino_model.xml").read_text(encoding="utf-8")
    renamed = text.replace('names="logits"', 'names="last_hidden_state"')
    (path / "openvino_model.xml").write_text(renamed, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="no output `logits`"):
        load_ir(path)

"""Reads an OpenVINO model directory, as optimum-intel exports it, into a PagedModel.

    export     input_ids attention_mask position_ids beam_idx ─▶ logits [batch, length, vocab]
               keys and values hidden in state, one sequence at a time
    paged      OpenVINO's own transformation puts paged attention in place of state and mask
    sampled    a Gather before the head, so that only the sampled rows are multiplied with it

Weights stay as the export wrote them: f32, f16, int8 or int4. What an export can hold that a paged
graph cannot is refused here, by name, before anything is compiled.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, PartialShape, Type
from openvino._offline_transformations import paged_attention_transformation

from kvota.core.errors import ConfigError, ModelError, UnsupportedModel
from kvota.formats.settings import Settings
from kvota.model.hf_config import read_json
from kvota.model.paged import KEY_CACHE, VALUE_CACHE, PagedModel
from kvota.model.weights import WeightFormat

GRAPH = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"
CONFIG = "config.json"

_SAMPLED = "sampled_tokens_indices"
_STEP_INPUTS = frozenset(
    {
        "input_ids",
        "position_ids",
        "past_lens",
        "subsequence_begins",
        "block_indices",
        "block_indices_begins",
        "max_context_len",
    }
)
# What may stand between the head's product and the logits: a bias, a scale, a soft cap.
_ROW_BY_ROW = frozenset({"Convert", "Add", "Subtract", "Multiply", "Divide", "Tanh"})
_EXPORT_COMMAND = "optimum-cli export openvino --task text-generation-with-past"


def load_ir(directory: Path, weight_format: WeightFormat = WeightFormat.AUTO) -> PagedModel:
    """The paged graph of the export in `directory`. Its weights are mapped, not read yet.

    Raises ConfigError for a weight format other than `auto`, since an export has one already;
    ModelError for files that are missing or broken; UnsupportedModel for an export that was made
    without past or whose graph is not one decoder with attention over its own KV.
    """
    if weight_format is not WeightFormat.AUTO:
        raise ConfigError(
            f"weights = {weight_format.value} cannot be had from {directory}: an OpenVINO model "
            "keeps the weights it was exported with. Leave weights at auto, or export again with "
            "--weight-format."
        )
    config = _config(directory)
    model = _read(directory)
    _make_paged(model, directory)
    num_layers = _count_layers(model, directory)
    vocab_size = _gather_sampled(model, directory)
    model.validate_nodes_and_infer_types()
    return PagedModel(model, num_layers, vocab_size, config.whole("max_position_embeddings"))


def _config(directory: Path) -> Settings:
    """The decoder's settings. Models of several parts keep them in a table of their own."""
    path = directory / CONFIG
    values = read_json(path)
    text = values.get("text_config")
    config = Settings(text if isinstance(text, dict) else values, str(path))
    _refuse_rotation_by_step(config)
    return config


def _refuse_rotation_by_step(config: Settings) -> None:
    """Refuse longrope, for which exports choose frequencies by the longest position of a step.

    Short sequences would change their answers whenever a long one runs beside them.
    """
    for name in ("rope_parameters", "rope_scaling"):
        table = config.get(name)
        kinds = (table.get("rope_type"), table.get("type")) if isinstance(table, dict) else ()
        if "longrope" in kinds or "su" in kinds:
            raise UnsupportedModel(
                f"{config.origin}: {name} is longrope, which an OpenVINO export computes for a "
                "whole step and not for each sequence. Serve its safetensors or GGUF instead."
            )


def _read(directory: Path) -> ov.Model:
    for name in (GRAPH, WEIGHTS):
        if not (directory / name).is_file():
            raise ModelError(
                f"{directory}: {name} is missing. An OpenVINO model is {GRAPH} and {WEIGHTS} "
                f"beside each other, as `{_EXPORT_COMMAND}` writes them."
            )
        _check_readable(directory / name)
    try:
        return ov.Core().read_model(directory / GRAPH)
    except (RuntimeError, UnicodeDecodeError) as error:  # or what it says is no text
        num_bytes = (directory / WEIGHTS).stat().st_size
        raise ModelError(
            f"{directory}: OpenVINO cannot read this model: {_reason(error)} {WEIGHTS} has "
            f"{num_bytes} bytes; a copy that stopped early looks like this, so copy it again."
        ) from error


def _check_readable(path: Path) -> None:
    """OpenVINO speaks of formats and copies where a permission is missing."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error


def _make_paged(model: ov.Model, directory: Path) -> None:
    """Replace state, mask and beams by paged attention, in place."""
    if not model.get_variables():
        raise UnsupportedModel(
            f"{directory}: the model keeps no keys and values between steps; it was exported "
            f"without past. Export it again: `{_EXPORT_COMMAND}`."
        )
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{directory}: OpenVINO cannot page this model's attention: {_reason(error)}"
        ) from error


def _count_layers(model: ov.Model, directory: Path) -> int:
    """The number of KV layers of a graph that has all of a step's inputs and no others."""
    names = {port.any_name for port in model.inputs}
    caches = {name for name in names if name.startswith((KEY_CACHE, VALUE_CACHE))}
    num_layers = len(caches) // 2
    if not caches or model.get_sinks():
        raise UnsupportedModel(
            f"{directory}: kvota serves decoders whose only state is the keys and values of "
            f"attention. This model has {num_layers} such layers and "
            f"{len(model.get_sinks())} states of another kind."
        )
    foreign = sorted(names - caches - _STEP_INPUTS)
    missing = sorted(_STEP_INPUTS - names)
    if foreign or missing:
        raise UnsupportedModel(
            f"{directory}: the model does not take plain tokens and positions: it has inputs "
            f"{foreign} besides them and lacks {missing}."
        )
    return num_layers


def _gather_sampled(model: ov.Model, directory: Path) -> int:
    """Make the logits [rows, vocab] of the sampled tokens alone, in place; the vocabulary's size.

    Tokens are gathered before the head, which is what saves the time. Where the head has a form
    that is not known, they are gathered after it: as right, and slower on long prompts.
    """
    result = _logits(model, directory)
    logits = result.input_value(0)
    vocab_size = logits.get_partial_shape()[2].get_length()
    sampled = ops.parameter(PartialShape([-1]), Type.i64, _SAMPLED)
    sampled.output(0).set_names({_SAMPLED})
    head = _head(logits.get_node())
    if head is not None:
        head.input(0).replace_source_output(_rows(head.input_value(0), sampled))
        head.validate_and_infer_types()
    else:
        logits = _rows(logits, sampled)
    flat = ops.convert(_reshape(logits, (-1, vocab_size)), Type.f32)
    flat.output(0).set_names({"logits"})
    result.input(0).replace_source_output(flat.output(0))
    model.add_parameters([sampled])
    return int(vocab_size)


def _logits(model: ov.Model, directory: Path) -> Node:
    """The one result [tokens, 1, vocab] that a decoder with a language head has."""
    for result in model.get_results():
        shape = result.input_value(0).get_partial_shape()
        is_ranked = shape.rank.is_static and len(shape) == 3
        if "logits" in result.input_value(0).get_names() and is_ranked and shape[2].is_static:
            return result
    raise UnsupportedModel(
        f"{directory}: the model has no output `logits` over a vocabulary; it is not a language "
        "model, or it was exported for another task."
    )


def _head(node: Node) -> Node | None:
    """The product that makes `node` out of hidden states, or None behind an unknown operation."""
    while node.get_type_name() in _ROW_BY_ROW:
        varying = [source for source in _sources(node) if not _is_fixed(source)]
        if len(varying) != 1:
            return None
        (node,) = varying
    if node.get_type_name() != "MatMul" or _is_fixed(node.input_value(0).get_node()):
        return None
    return node


def _is_fixed(node: Node) -> bool:
    """True when `node` is a constant or a compressed one being widened."""
    if node.get_type_name() == "Constant":
        return True
    return node.get_type_name() in _ROW_BY_ROW and all(map(_is_fixed, _sources(node)))


def _sources(node: Node) -> Iterator[Node]:
    for index in range(node.get_input_size()):
        yield node.input_value(index).get_node()


def _rows(tokens: ov.Output, sampled: Node) -> ov.Output:
    """The sampled rows of `tokens` [tokens, 1, size], as [rows, 1, size]."""
    gathered: ov.Output = ops.gather(tokens, sampled, ops.constant(np.int64(0))).output(0)
    return gathered


def _reshape(x: ov.Output, shape: tuple[int, ...]) -> Node:
    return ops.reshape(x, ops.constant(np.array(shape, np.int64)), False)


def _reason(error: RuntimeError | UnicodeDecodeError) -> str:
    """The last line of OpenVINO's message; those before it are places in its source."""
    if isinstance(error, UnicodeDecodeError):
        return f"{GRAPH} holds bytes that are no UTF-8."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "it gives no reason."

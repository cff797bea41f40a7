"""From the `quantization_config` of a config.json to the storage that its checkpoint has.

The fields are those of the writers: AutoAWQ, GPTQModel, llm-compressor (compressed-tensors),
DeepSeek's and vLLM's fp8, NVIDIA's modelopt, bitsandbytes, and OpenAI's mxfp4, which is only the
experts'. Embedding and head stay in 16 bits, as all of them leave them unless told otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from kvota.formats.settings import Settings
from kvota.tools.plan.hardware import Arithmetic, Hardware
from kvota.tools.plan.methods import Method, Storage

CHECKPOINT: Final = "checkpoint"  # the name of such a method
_EXPERTS: Final = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_F16: Final = Storage(16)
_MXFP4: Final = Storage(4, group=32, group_bits=8)
# Where `methods.py` ranks the same storage.
_FP8_RANK, _INT8_RANK, _FOUR_BIT_RANK = 1, 2, 6


def stored_method(values: Mapping[str, Any], origin: str) -> Method | None:
    """None: the checkpoint is as trained, or quantized by what is not known here.

    Raises ModelError naming the field that is wrong.
    """
    stated = _stated(values)
    if stated is None:
        return None
    config = Settings(stated, origin, where="quantization_config.")
    read = _READERS.get(str(config.get("quant_method")))
    return read(config) if read is not None else None


def note(values: Mapping[str, Any], method: Method | None) -> tuple[str, ...]:
    """What the reader of a plan should know of how the checkpoint is stored."""
    stated = _stated(values)
    if method is not None:
        return (f"its checkpoint is quantized: {method.title}",)
    if stated is None:
        return ()
    kind = stated.get("quant_method")
    return (
        f"its checkpoint is quantized with {kind!r}, not known here: planned as if it were not",
    )


def on(hardware: Hardware, method: Method) -> Method:
    """vLLM multiplies in 16 bits what a device has no arithmetic for (Marlin's kernels)."""
    if hardware.can(method.arithmetic):
        return method
    return replace(method, arithmetic=Arithmetic.F16, title=f"{method.title}, multiplied in fp16")


def _stated(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    inner = values.get("text_config")
    places = (values, inner if isinstance(inner, Mapping) else {})
    found = (place.get("quantization_config") for place in places)
    return next((one for one in found if isinstance(one, Mapping)), None)


def _method(title: str, layer: Storage, arithmetic: Arithmetic, rank: int) -> Method:
    return Method(
        name=CHECKPOINT,
        title=title,
        layer=layer,
        vocabulary=_F16,
        arithmetic=arithmetic,
        rank=rank,
    )


def _grouped(config: Settings, *, has_zeros: bool, has_index: bool, kind: str) -> Method:
    """Integers in groups of inputs: a scale in 16 bits each, and a zero point as wide as they."""
    bits, group = _whole(config, "bits", 4), config.whole("group_size", 128)
    beside = 16 + (bits if has_zeros else 0)
    index = 32 if has_index else 0
    if group < 1:  # -1: one group of all inputs
        layer = Storage(bits, output_bits=beside, input_bits=index)
        title = f"{kind} {bits} bit, one scale an output"
    else:
        layer = Storage(bits, group=group, group_bits=beside, input_bits=index)
        title = f"{kind} {bits} bit, groups of {group}"
    return _method(title, layer, Arithmetic.F16, _rank(bits))


def _awq(config: Settings) -> Method:
    if config.get("bits") is None and config.get("w_bit") is not None:  # AutoAWQ's first files
        bits, group = _whole(config, "w_bit", 4), config.whole("q_group_size", 128)
        config = Settings({"bits": bits, "group_size": group}, config.origin)
    return _grouped(config, has_zeros=True, has_index=False, kind="AWQ")


def _gptq(config: Settings) -> Method:
    return _grouped(config, has_zeros=True, has_index=True, kind="GPTQ")


def _fp8(config: Settings) -> Method:
    block = config.get("weight_block_size")
    if block is None:
        return _method("fp8", Storage(8, output_bits=32), Arithmetic.F8, _FP8_RANK)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_count, block)):
        raise config.wrong("weight_block_size", "two whole numbers of at least 1")
    layer = Storage(8, group=block[1], group_bits=32 / block[0])
    return _method(f"fp8, blocks of {block[0]} × {block[1]}", layer, Arithmetic.F8, _FP8_RANK)


def _mxfp4(_config: Settings) -> Method:
    method = _method("experts in mxfp4, groups of 32", _F16, Arithmetic.BF16, _FOUR_BIT_RANK)
    return replace(method, mixed=dict.fromkeys(_EXPERTS, (_MXFP4, 1.0)))


def _compressed(config: Settings) -> Method:
    """The first of its groups, which is all of them but in mixes."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    if not isinstance(first, Mapping) or not isinstance(first.get("weights"), Mapping):
        raise config.wrong("config_groups", "groups with weights")
    weights = Settings(first["weights"], config.origin, where="quantization_config.weights.")
    bits, group = _whole(weights, "num_bits", 8), weights.whole("group_size", 0)
    is_float = weights.get("type") == "float"
    zero_bits = 0 if weights.flag("symmetric", True) else bits
    scale_bits = 8 if is_float and bits == 4 else 16
    layer = (
        Storage(bits, group=group, group_bits=scale_bits + zero_bits)
        if group > 0
        else Storage(bits, output_bits=32)
    )
    has_activations = first.get("input_activations") is not None
    title = f"{'fp' if is_float else 'int'}{bits}" + (f", groups of {group}" if group > 0 else "")
    eight_bit = Arithmetic.F8 if is_float else Arithmetic.I8
    arithmetic = eight_bit if has_activations and bits == 8 else Arithmetic.F16
    rank = _FP8_RANK if is_float and bits == 8 else _rank(bits)
    return _method(title, layer, arithmetic, rank)


def _modelopt(config: Settings) -> Method | None:
    match config.get("quant_algo"):
        case "FP8":
            return _method("fp8", Storage(8, output_bits=32), Arithmetic.F8, _FP8_RANK)
        case "NVFP4":
            layer = Storage(4, group=16, group_bits=8)
            return _method("nvfp4, groups of 16", layer, Arithmetic.F16, _FOUR_BIT_RANK)
        case _:
            return None


def _bitsandbytes(config: Settings) -> Method:
    if config.flag("load_in_4bit", False):
        layer = Storage(4, group=64, group_bits=32)
        return _method("bitsandbytes 4 bit", layer, Arithmetic.F16, _FOUR_BIT_RANK)
    return _method("bitsandbytes 8 bit", Storage(8, output_bits=32), Arithmetic.F16, _INT8_RANK)


def _rank(bits: int) -> int:
    return _INT8_RANK if bits >= 8 else _FOUR_BIT_RANK


def _whole(config: Settings, name: str, default: int) -> int:
    value = config.whole(name, default)
    if value < 1:
        raise config.wrong(name, "at least 1")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_READERS: Final[Mapping[str, Callable[[Settings], Method | None]]] = MappingProxyType(
    {
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "bitsandbytes": _bitsandbytes,
    }
)

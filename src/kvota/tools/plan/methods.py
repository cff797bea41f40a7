"""How weights can be stored, and how many bytes that takes.

A matrix [n, k] takes n·k·bits, and beside the numbers: `group_bits` for every `group` inputs of an
output (scale and zero point), `output_bits` for every output, `input_bits` for every input.

Sources: AWQ and GPTQ as their checkpoints lie on disk (qweight, scales f16, qzeros 4 bits, GPTQ's
g_idx int32), group 128; fp8 and int8 as llm-compressor writes them (one scale an output; the
vocabulary stays in 16 bits in all four); GGUF block sizes from ggml, mixes from llama.cpp's
`llama_tensor_get_type`. `rank` says which is preferred when several do: the one that costs least
quality, and on a CPU int8, which is what `auto` means there for files that are not in 4 bits
(`model/precision.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError
from kvota.tools.plan.hardware import Arithmetic, Hardware
from kvota.tools.plan.matrices import Matrix, Role


@dataclass(frozen=True, slots=True)
class Storage:
    """Bits of a number, and of what lies beside the numbers."""

    bits: float
    group: int | None = None
    group_bits: float = 0
    output_bits: int = 0
    input_bits: int = 0

    def num_bytes(self, matrix: Matrix) -> float:
        outputs, inputs = matrix.num_outputs, matrix.num_inputs
        beside: float = outputs * self.output_bits + inputs * self.input_bits
        if self.group is not None:
            beside += outputs * -(-inputs // self.group) * self.group_bits
        return matrix.count * (outputs * inputs * self.bits + beside) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to store the weights of a whole model."""

    name: str
    title: str
    layer: Storage
    vocabulary: Storage
    arithmetic: Arithmetic
    rank: int
    head: Storage | None = None  # None: as the vocabulary
    # By matrix: another storage, and the share of layers that have it.
    mixed: Mapping[str, tuple[Storage, float]] = field(default_factory=dict)
    small: Storage = field(default=Storage(16))
    router: Storage = field(default=Storage(16))
    flags: tuple[str, ...] = ()  # for `vllm serve`
    vllm_can: bool = True
    needs_checkpoint: bool = False  # vLLM cannot quantize so while it loads

    def num_bytes(self, matrix: Matrix, *, is_tied: bool) -> float:
        """Of all `count` of it. `is_tied`: the embedding is the head too, and kept as well."""
        if matrix.is_tied:
            return 0.0
        mixed = self.mixed.get(matrix.name)
        if mixed is None:
            return self._storage(matrix.role, is_tied).num_bytes(matrix)
        better, share = mixed
        return share * better.num_bytes(matrix) + (1 - share) * self.layer.num_bytes(matrix)

    def _storage(self, role: Role, is_tied: bool) -> Storage:
        head = self.head or self.vocabulary
        match role:
            case Role.EMBEDDING:
                return head if is_tied else self.vocabulary
            case Role.HEAD:
                return head
            case Role.LAYER:
                return self.layer
            case Role.ROUTER:
                return self.router
            case Role.SMALL:
                return self.small


_F32: Final = Storage(32)
_F16: Final = Storage(16)
_Q4_0: Final = Storage(4.5)
_Q4_K: Final = Storage(4.5)
_Q5_K: Final = Storage(5.5)
_Q6_K: Final = Storage(6.5625)
_Q8_0: Final = Storage(8.5)
# llama.cpp's `use_more_bits`: the first and last eighth of the layers, and every third between.
_MORE_BITS: Final = 0.5


def _gguf(
    name: str, base: Storage, rank: int, *, head: Storage, better: Storage | None = None
) -> Method:
    mixed = {} if better is None else dict.fromkeys(("attn_v", "ffn_down"), (better, _MORE_BITS))
    return Method(
        name=name.lower(),
        title=name,
        layer=base,
        vocabulary=base,
        head=head,
        arithmetic=Arithmetic.F16,
        rank=rank,
        mixed=mixed,
        small=_F32,
        router=_F32,
        vllm_can=False,
    )


_GPU: Final = (
    Method(
        name="bf16",
        title="as trained",
        layer=_F16,
        vocabulary=_F16,
        arithmetic=Arithmetic.BF16,
        rank=0,
    ),
    Method(
        name="fp16",
        title="as trained, in fp16",
        layer=_F16,
        vocabulary=_F16,
        arithmetic=Arithmetic.F16,
        rank=0,
        flags=("--dtype", "half"),
    ),
    Method(
        name="fp8",
        title="8 bit",
        layer=Storage(8, output_bits=32),
        vocabulary=_F16,
        arithmetic=Arithmetic.F8,
        rank=1,
        flags=("--quantization", "fp8"),
    ),
    Method(
        name="int8",
        title="8 bit, W8A8",
        layer=Storage(8, output_bits=32),
        vocabulary=_F16,
        arithmetic=Arithmetic.I8,
        rank=2,
        needs_checkpoint=True,
    ),
    Method(
        name="awq",
        title="4 bit",
        layer=Storage(4, group=128, group_bits=20),
        vocabulary=_F16,
        arithmetic=Arithmetic.F16,
        rank=5,
        needs_checkpoint=True,
    ),
    Method(
        name="gptq",
        title="4 bit",
        layer=Storage(4, group=128, group_bits=20, input_bits=32),
        vocabulary=_F16,
        arithmetic=Arithmetic.F16,
        rank=6,
        needs_checkpoint=True,
    ),
    _gguf("Q8_0", _Q8_0, 1, head=_Q8_0),
    _gguf("Q6_K", _Q6_K, 3, head=_Q6_K),
    _gguf("Q5_K_M", _Q5_K, 4, head=_Q6_K, better=_Q6_K),
    _gguf("Q4_K_M", _Q4_K, 5, head=_Q6_K, better=_Q6_K),
    _gguf("Q4_0", _Q4_0, 7, head=_Q6_K),
)


def _own(
    name: str, title: str, storage: Storage, rank: int, vocabulary: Storage | None = None
) -> Method:
    """As kvota's CPU engine encodes them (`model/weights.py`)."""
    return Method(
        name=name,
        title=title,
        layer=storage,
        vocabulary=vocabulary or storage,
        arithmetic=Arithmetic.I8 if name.startswith("int") else Arithmetic.F32,
        rank=rank,
        small=_F32,
        router=_F32,
        vllm_can=False,
    )


_OWN_INT8: Final = Storage(8, group=96, group_bits=16)  # 64 to 128, by the model's sizes
_OWN_INT8_BESIDE_INT4: Final = Storage(8, group=32, group_bits=16)
# Beside a group of int4: scale 16, zero point 4, and its rest in int8 with a 32nd of a scale.
_OWN_INT4: Final = Storage(4, group=32, group_bits=28.5)
_CPU: Final = (
    _own("f32", "exact", _F32, 3),
    _own("f16", "16 bit", _F16, 2),
    _own("int8", "8 bit", _OWN_INT8, 0),
    _own("int4", "4 bit", _OWN_INT4, 1, _OWN_INT8_BESIDE_INT4),
)

GPU_METHODS: Final[Mapping[str, Method]] = MappingProxyType({one.name: one for one in _GPU})
CPU_METHODS: Final[Mapping[str, Method]] = MappingProxyType({one.name: one for one in _CPU})


def methods_on(hardware: Hardware) -> list[Method]:
    """What the engine of this hardware can run there: vLLM on a GPU, kvota's own on a CPU."""
    if not hardware.is_gpu:
        return list(CPU_METHODS.values())
    half = Arithmetic.BF16 if hardware.can(Arithmetic.BF16) else Arithmetic.F16
    return [
        method
        for method in GPU_METHODS.values()
        if method.vllm_can
        and hardware.can(method.arithmetic)
        and (method.layer != _F16 or method.arithmetic is half)
    ]


def named_method(name: str, hardware: Hardware) -> Method:
    """Raises ConfigError naming what there is, or why this hardware cannot."""
    table = GPU_METHODS if hardware.is_gpu else CPU_METHODS
    method = table.get(name.lower())
    if method is None:
        raise ConfigError(f"no weights are called {name!r}; use one of {', '.join(table)}.")
    if not hardware.can(method.arithmetic):
        raise ConfigError(f"{hardware.title} has no {method.arithmetic} arithmetic for {name}.")
    return method

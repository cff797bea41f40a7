"""From a graph to something that runs: compile once, weigh it, then attach KV memory.

The KV budget depends on how much memory the weights took, so the two are separate steps:

    compiled = compile_model(paged, …)      weights are resident now; measure the process
    executor = compiled.executor(num_blocks, sampler)
"""

import ctypes
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import openvino as ov

from kvota.core.plan import Capacity, Chunk, Draw, Sampled
from kvota.core.request import TokenLogprobs
from kvota.model.executor import OpenVinoExecutor, TokenSampler
from kvota.model.huge_pages import gather_weights, keep_small
from kvota.model.paged import BLOCK_SIZE, KEY_CACHE, VALUE_CACHE, PagedModel
from kvota.model.threads import usable_cores

COVERED_TOKENS = 512  # the bill's reserve for activations is meant for passes of so many


class KvDtype(StrEnum):
    """How keys and values are kept. `u8` has one scale and zero point per token and head."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"


class _NoSampler:
    """For passes whose logits nobody reads."""

    def sample(self, logits: object, draws: Sequence[Draw]) -> Sequence[Sampled]:
        raise AssertionError("warming up draws nothing")

    def prompt_logprobs(
        self, logits: object, next_tokens: Sequence[int], num_top: int
    ) -> Sequence[TokenLogprobs]:
        raise AssertionError("warming up reads no logits")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model whose weights are in memory and whose KV caches are not there yet."""

    compiled_model: ov.CompiledModel
    vocab_size: int
    max_position: int
    num_threads: int
    bytes_per_block: int

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return BLOCK_SIZE

    def executor(self, num_blocks: int, sampler: TokenSampler) -> OpenVinoExecutor:
        """Allocate `num_blocks` KV blocks, and one for padding, and make the executor over them."""
        request = self.compiled_model.create_infer_request()
        caches = []
        for port in _cache_ports(self.compiled_model):
            tensor = ov.Tensor(port.element_type, ov.Shape([num_blocks + 1, *_block_shape(port)]))
            keep_small(tensor.data.ctypes.data, tensor.byte_size)
            request.set_tensor(port, tensor)
            caches.append(tensor)
        capacity = Capacity(num_blocks, BLOCK_SIZE, self.bytes_per_block)
        return OpenVinoExecutor(request, caches, capacity, sampler, vocab_size=self.vocab_size)

    def warm_up(self, num_tokens: int = 0) -> None:
        """Run two passes, so that weights are packed for the kernels and their memory is counted.

        The plugin packs weights when it first needs them, in one layout for up to 4 rows and in
        another for more. A process weighed before that is lighter than it will be. The same goes
        for passes of more than `COVERED_TOKENS`: what `num_tokens` take is kept from then on, so
        one such pass is run as well.
        """
        executor = self.executor(1, _NoSampler())
        for num in (2, BLOCK_SIZE):
            executor.logits([Chunk(0, [0] * num, 0, (0,), prompt_logprobs=0, next_token=0)])
        if num_tokens > COVERED_TOKENS:
            num_chunks = -(-num_tokens // BLOCK_SIZE)
            executor.logits([Chunk(i, [0] * BLOCK_SIZE, 0, (0,)) for i in range(num_chunks)])


def compile_model(
    paged: PagedModel,
    *,
    kv_dtype: KvDtype = KvDtype.F16,
    num_threads: int | None = None,
    pass_tokens_max: int = 0,
) -> Compiled:
    """Compile for this machine's CPU with `num_threads` threads (None: every usable core).

    Memory for passes of up to `pass_tokens_max` tokens is taken here, or at the first such pass.
    Consumes `paged`: drop it afterwards, or the weights stay in memory twice.
    """
    threads = num_threads or usable_cores()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": paged.input_group,
        "KV_CACHE_PRECISION": kv_dtype.value,
        # By channel, a block's keys are rounded again whenever it grows, so that values would
        # depend on how a prompt was cut into chunks.
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
    }
    compiled_model = ov.Core().compile_model(paged.model, "CPU", settings)
    ports = _cache_ports(compiled_model)
    assert len(ports) == 2 * paged.num_layers, "every layer has one key and one value cache"
    compiled = Compiled(
        compiled_model=compiled_model,
        vocab_size=paged.vocab_size,
        max_position=paged.max_position,
        num_threads=threads,
        bytes_per_block=sum(_block_bytes(port) for port in ports),
    )
    compiled.warm_up(pass_tokens_max)
    return_free_memory()
    gather_weights()
    return compiled


def return_free_memory() -> None:
    """Give memory that Python and glibc hold for later back to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def _cache_ports(compiled_model: ov.CompiledModel) -> list[ov.Output]:
    prefixes = (KEY_CACHE, VALUE_CACHE)
    return [port for port in compiled_model.inputs if port.any_name.startswith(prefixes)]


def _block_shape(port: ov.Output) -> list[int]:
    """[KV heads, tokens, head size], each with room for scales where the plugin stores them."""
    return [dimension.get_length() for dimension in list(port.partial_shape)[1:]]


def _block_bytes(port: ov.Output) -> int:
    num_elements = 1
    for length in _block_shape(port):
        num_elements *= length
    return num_elements * int(port.element_type.size)

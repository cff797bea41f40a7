"""vLLM on a CPU: what it holds, as the planner's matrices say and as its worker's memory shows.

It packs every matrix that is multiplied for its kernels and gives the loaded one up, but of the
embedding and of the head it keeps both, and packs a tied matrix once for each of the two
(vllm 0.32.0, `UnquantizedEmbeddingMethod.process_weights_after_loading` with remove_weight=False):

    held = layers + 2 · embedding + 2 · head            head ≠ embedding
    held = layers + 3 · embedding                       head = embedding

The worker's memory without a model is measured with a model of two tiny layers. glibc moves its
threshold for mapping memory of its own accord, and then keeps up to 100 MB of what is freed while
weights are packed, never the same; so the threshold is fixed here.
"""

import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from bench.plan_vs_measured_bills import Row, VllmCpuBill, vllm_cpu_bill
from bench.server_process import free_port
from kvota.model.architecture import Architecture
from kvota.sizing.vllm import kv_tokens
from kvota.tools.plan.catalogue import known_model
from kvota.tools.plan.footprint import stored_bytes
from kvota.tools.plan.hf_shape import read_config
from kvota.tools.plan.matrices import Matrix, Role, matrices_of
from kvota.tools.plan.methods import GPU_METHODS, Method
from kvota.tools.plan.shape import ModelShape
from scripts.real_backends import EngineServer, running
from tests.support.tiny_models import tiny_architecture, write_safetensors

PYTHON: Final = Path(".venv-vllm/bin/python")
CONTEXT: Final = 1024
KV_GIB: Final = 1
AS_TRAINED: Final = GPU_METHODS["bf16"]


def held_bytes(matrices: Sequence[Matrix], method: Method) -> float:
    """Of all weights, after packing."""
    is_tied = any(matrix.is_tied for matrix in matrices)
    times = {Role.EMBEDDING: 3 if is_tied else 2, Role.HEAD: 2}
    return sum(
        times.get(matrix.role, 1) * method.num_bytes(matrix, is_tied=is_tied) for matrix in matrices
    )


def vllm_rows(folder: Path, model: str) -> list[Row]:
    """Start vLLM twice, with random weights of two layers and of a known model's sizes.

    Raises NotStarted and NotSaid.
    """
    tiny = _write(folder / "tiny", tiny_architecture("llama", head_size=32, max_position=CONTEXT))
    without = _bill_of(tiny)
    real = _write(folder / "real", _architecture(known_model(model)))
    return compare(read_config(real), _bill_of(real), base_bytes(read_config(tiny), without))


def base_bytes(shape: ModelShape, bill: VllmCpuBill) -> float:
    """The worker's memory without weights and KV."""
    kv_bytes = bill.kv_tokens * shape.kv_layout().bytes_per_token
    return bill.worker_bytes - held_bytes(matrices_of(shape), AS_TRAINED) - kv_bytes


def compare(shape: ModelShape, bill: VllmCpuBill, without_bytes: float) -> list[Row]:
    """`without_bytes`: what the worker holds before it has a model."""
    matrices = matrices_of(shape)
    per_token = shape.kv_layout().bytes_per_token
    planned_tokens = kv_tokens(bill.kv_bytes, per_token)
    held, planned_kv = held_bytes(matrices, AS_TRAINED), planned_tokens * per_token
    held_measured = bill.worker_bytes - without_bytes - bill.kv_tokens * per_token
    return [
        Row("weights in the checkpoint", stored_bytes(matrices, AS_TRAINED), bill.checkpoint_bytes),
        Row("weights as its worker holds them", held, held_measured),
        Row("KV of a token", per_token, bill.kv_bytes / bill.kv_tokens),
        Row("tokens in 1 GiB of KV", planned_tokens, bill.kv_tokens, is_bytes=False),
        Row("its worker in all", without_bytes + held + planned_kv, bill.worker_bytes),
    ]


def _architecture(shape: ModelShape) -> Architecture:
    """A Llama of these sizes."""
    return tiny_architecture(
        "llama",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        mlp_size=shape.mlp_size,
        vocab_size=shape.vocab_size,
        max_position=CONTEXT,
        tied_embeddings=shape.tied_embeddings,
    )


def _write(folder: Path, architecture: Architecture) -> Path:
    return write_safetensors(folder, architecture=architecture, dtype="BF16").path


def _bill_of(model: Path) -> VllmCpuBill:
    port, log = free_port(), model.with_suffix(".log")
    with running(_server(model, port), port, log):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            metrics = page.read().decode()
        children = psutil.Process().children(recursive=True)
        worker_bytes = max(child.memory_info().rss for child in children)
    return vllm_cpu_bill(log.read_text(errors="replace"), metrics, worker_bytes)


def _server(model: Path, port: int) -> EngineServer:
    return EngineServer(
        kind="vllm",
        python=PYTHON,
        arguments=(
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(CONTEXT), "--enforce-eager"),
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
    )

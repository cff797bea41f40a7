"""The plugin makes kernels once for each size of a pass: what `model/shapes.py` is there for.

Counted in what oneDNN says of itself (`ONEDNN_VERBOSE`), in a process of its own that it reads the
variable in: memory that a process holds is no exact figure, the number of kernels made is.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_safetensors

WARMED_UP = 600
LENGTHS = (129, 130, 131, 132, 133, 136, 134, WARMED_UP)
CODE = f"""
import sys
from pathlib import Path
from kvota.core.plan import Chunk
from kvota.model.compiled import compile_model
from kvota.model.graph import build_graph
from kvota.model.sampler import Sampler
from kvota.model.source import open_source
from kvota.model.weights import WeightFormat

paged = build_graph(open_source(Path(sys.argv[1])), WeightFormat.INT8)
compiled = compile_model(paged, num_threads=1, pass_tokens_max={WARMED_UP})
executor = compiled.executor(8, Sampler(320))
for length in {LENGTHS}:
    print("pass of", length, flush=True)
    num_chunks = -(-length // 150)
    tokens = [7] * (length // num_chunks)
    executor.logits([Chunk(i, tokens, 0, (0, 1, 2, 3, 4)) for i in range(num_chunks)])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN computes on x86-64 only")
def test_kernels_are_made_once_for_all_lengths_of_a_size(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "tiny").path
    said = subprocess.run(
        [sys.executable, "-c", CODE, str(model)],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    made: dict[int, int] = {}
    for line in said.splitlines():
        if line.startswith("pass of"):
            made[int(line.split()[-1])] = 0
        elif "create:cache_miss" in line and made:
            made[list(made)[-1]] += 1
    assert tuple(made) == LENGTHS
    assert made[129] > 0, "the first of its size"
    assert made[133] == made[129], "the next size costs the same"
    assert made[WARMED_UP] == 0, "the largest pass was tried when the model was compiled"
    assert sum(made.values()) == made[129] + made[133], made

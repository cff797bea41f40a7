"""Write tests/golden/tiny_ir/: small OpenVINO models by optimum-intel, and Hugging Face's logits.

In an environment of its own, for optimum-intel wants an older transformers than golden.py:

    pip install torch==2.13.0 optimum-intel==2.2.0 openvino==2026.4.1
    python scripts/golden_ir.py

With a build of torch for CPUs only, `pip uninstall torchvision` afterwards: optimum-intel requires
it, language models do not use it, and the package index has it for the other build.

    mistral_f16   a head of its own, sliding window of 32, f16 weights
    qwen3_int8    shared embeddings, norms on q and k, 8-bit weights with a scale and zero a row

Weights lie on a grid that both formats hold exactly (see `on_grid`), so Hugging Face's float32
logits are right for the stored models as well, to rounding.
"""

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from optimum.intel import OVModelForCausalLM
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

OUT = Path(__file__).parents[1] / "tests" / "golden" / "tiny_ir"
KEPT = ("openvino_model.xml", "openvino_model.bin", "config.json")

NUM_TOKENS = 80  # over two blocks, and over twice the window
ROWS = (0, 31, 32, 40, 64, 79)
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def on_grid(shape: torch.Size) -> torch.Tensor:
    """Random multiples of 1/512 in [-1/4, 1/4), with both ends in every row.

    255 steps from -128/512 to 127/512: an 8-bit code with scale 1/512 and zero point 128 a row.
    """
    codes = torch.randint(-127, 127, shape)
    if len(shape) == 2:
        places = torch.rand(shape).argsort(dim=1)
        codes.scatter_(1, places[:, :1], -128)
        codes.scatter_(1, places[:, 1:2], 127)
        return codes / 512
    return 1 + codes / 512  # the gain of a norm


def models() -> dict[str, Any]:
    torch.manual_seed(20)
    made = {
        "mistral_f16": MistralForCausalLM(
            MistralConfig(**SHAPE, sliding_window=32, tie_word_embeddings=False)
        ),
        "qwen3_int8": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    }
    with torch.no_grad():
        for model in made.values():
            for parameter in model.parameters():
                parameter.copy_(on_grid(parameter.shape))
    return made


def export(model: Any, name: str) -> None:
    """Write the model as an OpenVINO directory with only what kvota reads."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "hf"), Path(folder, "ir")
        stored = model.half() if name.endswith("f16") else model
        stored.save_pretrained(source)
        exported = OVModelForCausalLM.from_pretrained(
            source, export=True, compile=False, load_in_8bit=name.endswith("int8")
        )
        exported.save_pretrained(target)
        (OUT / name).mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(target / file, OUT / name / file)


def main() -> None:
    tokens = np.random.default_rng(20).integers(3, SHAPE["vocab_size"], NUM_TOKENS).tolist()
    oracle: dict[str, Any] = {
        "about": "Written by scripts/golden_ir.py: Hugging Face's float32 logits at some rows.",
        "versions": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "optimum-intel": version("optimum-intel"),
        },
        "tokens": tokens,
        "rows": ROWS,
        "logits": {},
    }
    for name, model in models().items():
        with torch.no_grad():
            logits = model.eval().float()(torch.tensor([tokens])).logits[0]
        oracle["logits"][name] = [
            [round(value, 5) for value in logits[row].tolist()] for row in ROWS
        ]
        export(model, name)
    text = json.dumps(oracle, separators=(",", ":")).replace("],[", "],\n[")
    (OUT / "oracle.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Ask Hugging Face's models for the logits of the tiny test models, and keep a few of them.

    pip install torch transformers
    PYTHONPATH=src:. python scripts/golden_families.py     writes tests/golden/families.json

Run it in an environment of its own: kvota needs neither package. It stops if the numpy reference
and Hugging Face differ by 1e-4 or more in any logit of any case.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.support.family_cases import family_cases, num_golden_tokens, rope_cases
from tests.support.reference import reference_logits
from tests.support.tiny_models import fixed_tokens, write_safetensors

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "families.json"
TOLERANCE = 1e-4


def main() -> int:
    cases: dict[str, Any] = {}
    worst = 0.0
    for name, architecture in (family_cases() | rope_cases()).items():
        tokens = fixed_tokens(num_golden_tokens(architecture), architecture.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            tiny = write_safetensors(Path(folder), architecture=architecture, with_tokenizer=False)
            theirs = hugging_face_logits(tiny.path, tokens)
        ours = reference_logits(architecture, tiny.weights, tokens)
        difference = float(np.abs(ours - theirs).max())
        worst = max(worst, difference)
        print(f"{name:28} {len(tokens)} tokens, largest difference {difference:.1e}")
        cases[name] = excerpt(theirs)
    if worst >= TOLERANCE:
        print(f"not written: {worst:.1e} is not below {TOLERANCE}", file=sys.stderr)
        return 1
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    GOLDEN.write_text(json.dumps({"made_with": made_with, "cases": cases}, indent=1) + "\n")
    return 0


def hugging_face_logits(folder: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """All logits of one forward pass in float64, eager attention, no cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]
    return np.asarray(logits.double().numpy(), dtype=np.float64)


def excerpt(logits: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Five positions: the most likely token, log of the normalizer, and six logits of each."""
    num_tokens, vocab_size = logits.shape
    positions = [0, 1, num_tokens // 3, num_tokens * 25 // 32, num_tokens - 1]
    tokens = [0, 1, vocab_size // 3, vocab_size // 2, vocab_size - 2, vocab_size - 1]
    chosen = logits[positions]
    normalizer = chosen.max(axis=1) + np.log(np.exp(chosen - chosen.max(1)[:, None]).sum(axis=1))
    return {
        "positions": positions,
        "tokens": tokens,
        "most_likely": chosen.argmax(axis=1).tolist(),
        "log_normalizer": normalizer.round(6).tolist(),
        "logits": chosen[:, tokens].round(6).tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())

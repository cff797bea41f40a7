"""What the default weights change: divergence from f32 weights on English, Chinese and code.

python -m bench.quality MODEL.gguf
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.loaded import load, log_probabilities
from bench.machine import usable_threads

TEXT = Path(__file__).parent / "text.txt"
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all positions of the text, against f32 weights with an f32 KV cache."""

    num_tokens: int
    divergence_nats: float  # KL(f32 ‖ default)
    same_top: float  # share of positions with the same most likely token
    perplexity: float
    perplexity_f32: float

    def line(self) -> str:
        return (
            f"default weights against f32 on {self.num_tokens:,} tokens: mean KL "
            f"{self.divergence_nats:.4f} nats, same top token {self.same_top:.1%}, "
            f"perplexity {self.perplexity:.2f} ({self.perplexity_f32:.2f} in f32)"
        )


def quality(model: Path, threads: int, weights: str = "auto", limit: int | None = None) -> Quality:
    """Compare the two on the shipped text, or on its first `limit` tokens."""
    loaded, default = load(model, threads, weights=weights)
    _, exact = load(model, threads, weights="f32", kv_dtype="f32")
    tokens = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:limit]
    divergence, same, surprise, surprise_f32 = [], [], [], []
    for start in range(0, len(tokens) - 1, CHUNK):
        part = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        p, q = (log_probabilities(executor, part, start) for executor in (exact, default))
        divergence.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
        followed = (np.arange(len(part)), tokens[start + 1 : start + 1 + len(part)])
        surprise_f32.append(-p[followed])
        surprise.append(-q[followed])
    return Quality(
        num_tokens=len(tokens) - 1,
        divergence_nats=float(np.concatenate(divergence).mean()),
        same_top=float(np.concatenate(same).mean()),
        perplexity=float(np.exp(np.concatenate(surprise).mean())),
        perplexity_f32=float(np.exp(np.concatenate(surprise_f32).mean())),
    )


if __name__ == "__main__":
    print(quality(Path(sys.argv[1]), usable_threads()).line())

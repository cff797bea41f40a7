"""The architectures that every statement about model correctness is made for, by name.

Each family with its own switches, then Llama with every rope variant, and the combinations that
have gone wrong elsewhere. Used for the golden logits and for the product's own graph.
"""

from dataclasses import replace

from kvota.model.architecture import Architecture
from tests.support.tiny_models import NUM_TRAINED, tiny_architecture, tiny_ropes


def family_cases() -> dict[str, Architecture]:
    """One case per family and switch, all with plain rope."""
    return {
        "llama": tiny_architecture("llama"),
        "llama_tied": tiny_architecture("llama", tied_embeddings=True),
        "llama_biases": tiny_architecture("llama", qkv_bias=True, output_bias=True, mlp_bias=True),
        "llama_wide_head": tiny_architecture("llama", head_size=32),
        "llama_one_kv_head": tiny_architecture("llama", num_kv_heads=1),
        "llama_no_shared_heads": tiny_architecture("llama", num_kv_heads=4),
        "llama_odd_vocabulary": tiny_architecture("llama", vocab_size=323),
        "mistral": tiny_architecture("mistral"),
        "mistral_no_window": tiny_architecture("mistral", sliding_window=None),
        "qwen2": tiny_architecture("qwen2"),
        "qwen2_untied": tiny_architecture("qwen2", tied_embeddings=False),
        "qwen2_half_sliding": tiny_architecture(
            "qwen2", sliding_window=24, sliding_layers=(False, True)
        ),
        "qwen3": tiny_architecture("qwen3"),
        "qwen3_biases": tiny_architecture("qwen3", qkv_bias=True, output_bias=True),
        "smollm3": tiny_architecture("smollm3"),
        "smollm3_sliding": tiny_architecture(
            "smollm3",
            num_layers=2,
            rope_layers=(False, True),
            sliding_window=24,
            sliding_layers=(True, False),
        ),
    }


def rope_cases() -> dict[str, Architecture]:
    """Llama with each rope variant, and two other families with a stretched one."""
    llama = tiny_architecture("llama")
    cases = {f"llama_{name}": replace(llama, rope=rope) for name, rope in tiny_ropes().items()}
    short = replace(cases["llama_longrope"], max_position=NUM_TRAINED)
    cases["llama_longrope_short"] = replace(short, rope=replace(short.rope, factor=1.0))
    wide = tiny_ropes(head_size=32)
    cases["qwen2_yarn"] = tiny_architecture("qwen2", rope=tiny_ropes()["yarn"])
    cases["qwen3_yarn"] = tiny_architecture("qwen3", rope=wide["yarn"])
    return cases


def num_golden_tokens(architecture: Architecture) -> int:
    """As long as the model can go: dynamic rope is only there the same for everybody."""
    return architecture.max_position

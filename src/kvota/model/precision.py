"""What `auto` means, and why: how weights are kept and in what arithmetic they are multiplied.

f32 and f16 weights are multiplied in f32, and give the tokens that Hugging Face gives in f32.
OpenVINO's own default, bf16 where the CPU has it, would not.

int8 keeps weights in groups with one scale each. Where the CPU has int8 dot products (VNNI), the
inputs of a product are rounded to int8 as well, in groups of as many per token; elsewhere the
plugin multiplies the codes in f32. A large group costs less time than several small ones, but more
quality, unless the hidden state is turned before (`turned.py`). So where all matrices become int8,
they are turned and in groups of 64 to 128, the most that divides all their inputs. Beside int4,
whose groups are 32, they are not, and scales of 32 are chosen so that the 16 levels of a 4-bit file
are met (`weights.py`).

First without turning: SmolLM2-135M (from Q4_1) on an AVX-512 VNNI machine, milliseconds of CPU of
one thread, the least of several alternating runs, for a step of 1, 4, 16 and 64 sequences with 100
tokens each and for a prompt of 64 tokens, four of them in a pass; mean KL divergence from f32
weights in nats on the 720 tokens of `bench/text.txt` and on 600 of a technical text:

    weights           inputs           1     4    16    64  prompt   KL shipped, technical
    f32               exact         27.6  28.7  57.0   202     133   0
    f16               exact         27.3  27.8  56.5   201     133   0.0000
    int8 groups of 64 exact         15.9  19.2  71.8   217     144   0.0019  0.0023
    int8 groups of 32 exact         17.0  20.1  72.0   213     145   0.0002  0.0003
    int8 groups of 64 int8 by 64    12.8  13.9  31.3    99      58   0.0076  0.0100
    int8 groups of 32 int8 by 32    12.6  15.6  33.3   109      65   0.0034  0.0046  ← beside int4
    int8 groups of 32 int8 by 16    13.0  14.9  38.1   144      84   0.0020  0.0024
    f16               bf16          22.0  17.1  36.2   118      71   0.0007  0.0007

With the finest scale for every group instead, int8 by 32 has 0.0046 and 0.0053. f16 in bf16 is
closer, but nearly twice as slow for one sequence, and twice as large.

Turned, mean KL on the shipped text by the size of groups, with and without what `sinks.py` does to
values; 64 was faster than 32 without turning by 7, 5, 4 and 10 % for 1, 4, 16 and 64 sequences and
by 14 % for 512 tokens of prompts, and 96 than 64 by 2, 2, 3, 5 and 7 % (two processes by turns,
medians of the pairs' ratios):

    groups of             64       96      192
    as they come      0.0044   0.0055   0.0067
    values steered    0.0038   0.0046   0.0062       ← auto: 96

int4 has the file's own numbers where the file is in 4 bits, and is as close: 0.0034 on the shipped
text. Without the rest that `weights.py` keeps, with whole zero points only, it is 0.33; fractional
ones would keep the kernels from int8 dot products. A file in more bits is rounded to 16 levels;
what that costs depends on the model and is in no figure here.

What int4 gains is bytes to read, most of a step of few rows; what it costs is another 32nd of the
work, and three small nodes for each product. Likewise measured, by turns in one process: Llamas of
one layer (of 1024: two) with random numbers as in Q4_1, by hidden and MLP size, and SmolLM2-135M
whole; the machine was busy, so compare within pairs:

    hidden, MLP             1            4           16           64         prompt
                     int8  int4   int8  int4   int8  int4   int8  int4   int8  int4
     576,  1536      15.8  14.7   18.6  18.1   36.8  39.4    107   130     76    91
    1024,  3072       3.1   1.9    3.5   2.7    6.2   6.0   18.3  19.7   15.6  16.8
    1536,  8960       5.4   3.7    6.3   5.1   11.1   9.9   31.3  34.1   29.9  34.0
    2048,  8192       5.8   3.8    6.5   5.1   11.6  11.1   36.8  39.4   34.1  36.7  ← auto: int4
    4096, 14336      16.9  10.8   17.8  13.8   36.8  31.8    124   134    121   126  ← auto: int4

So `auto` leaves a matrix in 4 bits if the file has it so and both its sides have at least 2048: a
third faster for one sequence, 5 to 14 % for 16, 4 to 9 % slower for 64 and for prompts, and little
more than half the memory. On smaller ones prompts and full batches lose more.

Rounded inputs make results sensitive: a difference in the last bit can move a code, and from
there all logits. That is affordable only because a token's way through the kernels never depends
on its neighbours (`batch.py`).
"""

from collections.abc import Sequence

from kvota.model.architecture import Weight, WeightSource
from kvota.model.levels import GROUP, LeveledWeight
from kvota.model.turned import block_of
from kvota.model.weights import WeightFormat

EXACT_INPUTS = 0
KEPT_SIDE_MIN = 2048  # inputs, and outputs, of a matrix that `auto` leaves in 4 bits


def turned_block(asked: WeightFormat, source: WeightSource) -> int | None:
    """By what blocks the model is turned: where every matrix will be int8, and has whole ones."""
    a = source.architecture
    if asked not in (WeightFormat.AUTO, WeightFormat.INT8):
        return None
    may_keep = asked is WeightFormat.AUTO and a.hidden_size >= KEPT_SIDE_MIN
    is_kept = may_keep and any(map(_has_levels, source.weights.values()))
    return None if is_kept else block_of(a)


def format_of(asked: WeightFormat, parts: Sequence[Weight]) -> WeightFormat:
    """How a matrix of a layer is stored whose outputs are those of `parts`, on the same inputs."""
    if asked is not WeightFormat.AUTO:
        return asked
    num_outputs, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    is_large = min(num_outputs, num_inputs) >= KEPT_SIDE_MIN
    return WeightFormat.INT4 if is_large and all(map(_has_levels, parts)) else WeightFormat.INT8


def _has_levels(weight: Weight) -> bool:
    return isinstance(weight, LeveledWeight) and weight.has_levels


def vocabulary_format(asked: WeightFormat) -> WeightFormat:
    """How the embedding and the head are stored.

    A vocabulary matrix in 4 bits would cost more quality than it saves memory.
    """
    is_compressed = asked in (WeightFormat.AUTO, WeightFormat.INT4)
    return WeightFormat.INT8 if is_compressed else asked


def int8_group(turned_by: int | None) -> int:
    """Inputs of a matrix in int8 that share a scale, by the blocks that its model is turned by."""
    return GROUP if turned_by is None else turned_by


def input_group(asked: WeightFormat, turned_by: int | None) -> int:
    """Inputs of a product that share a scale when rounded to int8; 0: they are not rounded."""
    is_exact = asked in (WeightFormat.F32, WeightFormat.F16)
    return EXACT_INPUTS if is_exact else int8_group(turned_by)

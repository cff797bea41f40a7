"""What every way of making a model agrees on: one graph, these inputs, one output.

T = all tokens of a step, S = sequences in it, B = blocks they occupy, R = rows to sample.

    input_ids i64 [T]              position_ids i64 [T]
    past_lens i32 [S]              tokens of each sequence that are in KV already
    subsequence_begins i32 [S+1]   where each sequence's tokens start among the T
    block_indices i32 [B]          all block tables, one after another
    block_indices_begins i32 [S+1] where each table starts
    max_context_len i32 []         longest past + new of any sequence
    sampled_tokens_indices i64 [R] which of the T get logits
    key_cache.N, value_cache.N     KV of layer N, whose shape the plugin decides
    → logits f32 [R, vocab]
"""

from dataclasses import dataclass

import openvino as ov

KEY_CACHE = "key_cache."
VALUE_CACHE = "value_cache."

BLOCK_SIZE = 32  # tokens; fixed by OpenVINO's CPU kernel


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A graph with the inputs above, not compiled yet. It owns its weights."""

    model: ov.Model
    num_layers: int
    vocab_size: int
    max_position: int  # longest context its rotary positions are good for
    input_group: int = 0  # inputs of products rounded to int8 by so many; 0: not rounded
    weights: str = "as exported"  # what the layers' matrices are held as, for people

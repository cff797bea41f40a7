"""The yardstick, openvino-genai, as a process that has loaded the model once.

Runs in an environment of its own (requirements/bench.lock), from the repository's root, and imports
nothing of kvota.

    python -m bench.genai_child loop|server MODEL.gguf THREADS KV_CACHE_GB
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.genai_loop import obey
from bench.genai_server import serve


class GenaiGeneration:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def is_over(self) -> bool:
        return bool(self._handle.get_status() != genai.GenerationStatus.RUNNING)

    def new_tokens(self) -> Sequence[int]:
        tokens: list[int] = []
        while self._handle.can_read():
            for output in self._handle.read().values():
                tokens += output.generated_ids
        return tokens


class GenaiPipeline:
    """The same settings for whoever steps it."""

    def __init__(self, model: str, threads: int, cache_gb: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 256
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_added = 0

    def add(self, prompt: Sequence[int], num_tokens: int) -> GenaiGeneration:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = num_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        self._num_added += 1
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return GenaiGeneration(self._pipeline.add_request(self._num_added, ids, settings))

    def step(self) -> None:
        self._pipeline.step()

    def vocabulary(self) -> list[bytes]:
        """What each token adds to a text; special ones add nothing.

        Right for byte-level vocabularies, whose tokens may hold a part of a character.
        """
        tokenizer = self._pipeline.get_tokenizer()
        content_of = {token: content for content, token in tokenizer.get_vocab().items()}
        tokens = range(max(content_of) + 1)
        texts = tokenizer.decode([[token] for token in tokens])
        return [
            b"" if not text and _is_text(content_of[token]) else content_of[token]
            for token, text in zip(tokens, texts, strict=True)
        ]


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def main(mode: str, model: str, threads: int, cache_gb: int) -> None:
    pipeline = GenaiPipeline(model, threads, cache_gb)
    if mode == "loop":
        obey(pipeline)
    else:
        asyncio.run(serve(pipeline, pipeline.vocabulary(), _print_port))


def _print_port(port: int) -> None:
    print(json.dumps({"port": port}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

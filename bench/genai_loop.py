"""The yardstick: openvino-genai's continuous batching in a process of its own.

Runs in an environment of its own (requirements/bench.lock) and imports nothing of kvota. Loads the
model once; then for each line on stdin, `{"prompts": [[id, …], …], "num_tokens": n}`, adds all
prompts, steps until all are done, and prints `{"num_tokens": …, "seconds": …}`.

    python bench/genai_loop.py MODEL.gguf THREADS KV_CACHE_GB
"""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def main(model: str, threads: int, cache_gb: int) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run(pipeline, json.loads(line), number)), flush=True)


def run(pipeline: Any, work: dict[str, Any], number: int) -> dict[str, float]:
    """Generate for all prompts of `work` together."""
    settings = genai.GenerationConfig()
    settings.max_new_tokens = work["num_tokens"]
    settings.ignore_eos = True
    settings.do_sample = False
    start = time.perf_counter()
    handles = []
    for index, prompt in enumerate(work["prompts"]):
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(number * 100_000 + index, ids, settings))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    seconds = time.perf_counter() - start
    outputs = [output for handle in handles for output in handle.read_all()]
    return {"num_tokens": sum(len(o.generated_ids) for o in outputs), "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

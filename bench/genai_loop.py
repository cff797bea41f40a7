"""openvino-genai's continuous batching on command: what it can do with no HTTP around it.

For each line on stdin, `{"prompts": [[id, …], …], "num_tokens": n, "at_once": k}`, generates after
all prompts, `k` of them at any time, and prints `{"num_tokens": …, "tokens_per_s": …}`: the rate
while the load lasts, as for everyone who is measured (see `lasting.py`).
"""

import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from bench.lasting import Mark, rate, wanted_marks


class Generation(Protocol):
    """What becomes of one prompt."""

    @property
    def is_over(self) -> bool:
        """No step adds to it any more."""

    def new_tokens(self) -> Sequence[int]:
        """Those since the last call."""


class Pipeline(Protocol):
    def add(self, prompt: Sequence[int], num_tokens: int) -> Generation:
        """Take part in every step from the next on."""

    def step(self) -> None:
        """One token more for all whose prompts had room so far. Holds Python's lock."""


def obey(pipeline: Pipeline) -> None:
    """Work off the lines of stdin until it is closed."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, **json.loads(line))), flush=True)


def run(
    pipeline: Pipeline, prompts: Sequence[Sequence[int]], num_tokens: int, at_once: int
) -> dict[str, Any]:
    """A prompt takes the place of another as soon as that is over."""
    begun: list[Generation] = []
    running: list[Generation] = []
    left = iter(prompts)
    num_made = 0
    marks: list[Mark] = []

    def mark() -> Mark:
        nonlocal num_made
        num_made += sum(len(generation.new_tokens()) for generation in begun)
        return Mark(num_made, time.perf_counter())

    while True:
        new = [pipeline.add(p, num_tokens) for p in islice(left, at_once - len(running))]
        begun += new
        running += new
        if not running:
            break
        for number in wanted_marks(at_once, len(prompts))[len(marks) :]:
            if len(begun) >= number:
                marks.append(mark())
        pipeline.step()
        running = [generation for generation in running if not generation.is_over]
    return {"num_tokens": mark().num_tokens, "tokens_per_s": rate(*marks)}

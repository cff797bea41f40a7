"""A stand-in for `vllm serve`: its command line, its pages, and words instead of a model.

python -m tests.support.fake_vllm --model MODEL --host 127.0.0.1 --port 1234 [flags of vLLM]

FAKE_VLLM_DELAY_S is the time before each word. Told to stop, it stops at once, as vLLM does.
"""

import asyncio
import os
import sys

from tests.support.fake_backend import FakeBackend, fails


async def main() -> None:
    print("fake vllm", *sys.argv[1:], file=sys.stderr, flush=True)
    backend = FakeBackend(delay_s=float(os.environ.get("FAKE_VLLM_DELAY_S", "0")))
    backend.keeps_received = False
    backend.overrides["/ready"] = fails(404)
    await backend.listen(int(sys.argv[sys.argv.index("--port") + 1]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

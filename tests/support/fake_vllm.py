"""A stand-in for `vllm serve`: its command line, its pages, and words instead of a model.

python -m tests.support.fake_vllm MODEL --host 127.0.0.1 --port 1234 [flags of vLLM]
"""

import asyncio
import sys

from tests.support.fake_backend import FakeBackend


async def main() -> None:
    print("fake vllm", *sys.argv[1:], file=sys.stderr, flush=True)
    backend = FakeBackend()
    backend.keeps_received = False
    await backend.listen(int(sys.argv[sys.argv.index("--port") + 1]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

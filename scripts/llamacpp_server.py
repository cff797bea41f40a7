"""llama.cpp's own HTTP server, out of the package xllamacpp: for `make test-vllm`.

python scripts/llamacpp_server.py MODEL.gguf PORT

Runs in an environment of its own, which has nothing of kvota. Ends with the process.
"""

import sys
import threading

import xllamacpp  # type: ignore[import-not-found]  # it lives in .venv-llamacpp

NUM_SLOTS = 4
CONTEXT = 1024  # tokens of each slot


def main() -> None:
    model, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = NUM_SLOTS
    params.n_ctx = NUM_SLOTS * CONTEXT
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

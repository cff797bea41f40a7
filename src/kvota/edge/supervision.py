"""How a gateway and the node that it has started hold on to each other.

node, standard output    one line of JSON, when it listens: what it serves and plans to hold
node, standard input     the lifeline: it ends when the gateway does, however that ends; who does
                         not heed it is killed (`leash.py`)
node, standard error     what an operator reads, as ever
SIGTERM                  the node drains and exits, as ever
"""

import asyncio
import os
import sys

import msgspec

READ_BYTES = 4096


class NodeReady(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it listens."""

    model: str  # the served name
    max_model_len: int  # tokens
    kv_tokens: int  # capacity of the KV cache
    planned_bytes: int  # resident memory that the bill allows: weights, KV and reserve


def announce(ready: NodeReady) -> None:
    """Tell whoever started this process. Nothing else may ever be written to standard output."""
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()


def read_ready(line: bytes) -> NodeReady | None:
    """The announcement in `line`; None when it is something else."""
    try:
        return msgspec.json.decode(line, type=NodeReady)
    except msgspec.MsgspecError:
        return None


def watch_lifeline(told: asyncio.Event) -> None:
    """Set `told` when standard input ends: nobody is there any more to serve for."""
    loop, lifeline = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_readable() -> None:
        if not os.read(lifeline, READ_BYTES):
            loop.remove_reader(lifeline)
            told.set()

    loop.add_reader(lifeline, on_readable)

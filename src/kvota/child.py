"""The node that a gateway has started: `python -m kvota.child FILE`, with its settings in FILE.

The same as `kvota node --config FILE`, without the other commands, which would only take time to
load. How the two processes hold on to each other: `edge/supervision.py`.
"""

import os
import sys
from pathlib import Path

from kvota.cli_errors import fail
from kvota.config import load
from kvota.core.errors import KvotaError
from kvota.model.catalog import cache_dir_of, expanded
from kvota.node.serve import run


def main(file: Path) -> int:
    """Serve until told to stop. Returns the exit status; errors are told on standard error."""
    try:
        settings = load(file=file)
        chosen = settings.model.cache_dir
        return run(
            settings.model,
            settings.engine,
            settings.desk,
            settings.server,
            expanded(chosen) if chosen else cache_dir_of(os.environ),
            embeddings=settings.embeddings,
            supervised=True,
        )
    except KvotaError as error:
        fail(error, is_server=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

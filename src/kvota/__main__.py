"""`python -m kvota`, and the console script: the same commands as `kvota.cli`.

A server lives long, so the commands that run one load nothing that only others need: 30 MB less.
"""

import sys
from importlib import import_module
from typing import Final

SERVING: Final = ("serve", "gateway")
EXIT_INTERRUPTED: Final = 130  # what a shell makes of SIGINT


def main() -> None:
    is_serving = len(sys.argv) > 1 and sys.argv[1] in SERVING
    try:
        import_module("kvota.cli_gateway" if is_serving else "kvota.cli").main()
    except KeyboardInterrupt:  # while modules are loaded; a command that runs says more itself
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()

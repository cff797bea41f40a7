"""What an operator reads when a command cannot do its work: one message, and no traceback."""

import sys
from typing import Final, NoReturn

from rich.console import Console
from rich.markup import escape

from kvota.core.errors import KvotaError, StartupError

EXIT_FAILED: Final = 2
SERVERS: Final = frozenset({"serve", "gateway", "node"})  # the commands that start something


def fail(error: KvotaError, *, is_server: bool = False) -> NoReturn:
    """Say it, and end the process. `is_server`: it was to be one, whatever is in argv."""
    is_server = is_server or not SERVERS.isdisjoint(sys.argv[1:2])
    is_starting = is_server and isinstance(error, StartupError)
    kind = "[bold]kvota cannot start.[/bold] " if is_starting else ""
    Console(stderr=True, highlight=False).print(f"{kind}{escape(error.message)}", soft_wrap=True)
    sys.exit(EXIT_FAILED)

"""What an operator reads when a command cannot do its work: one message, and no traceback."""

import sys
from typing import Final, NoReturn

from rich.console import Console
from rich.markup import escape

from kvota.core.errors import KvotaError, StartupError

EXIT_FAILED: Final = 2


def fail(error: KvotaError) -> NoReturn:
    """Say it, and end the process."""
    kind = "[bold]kvota cannot start.[/bold] " if isinstance(error, StartupError) else ""
    Console(stderr=True, highlight=False).print(f"{kind}{escape(error.message)}", soft_wrap=True)
    sys.exit(EXIT_FAILED)

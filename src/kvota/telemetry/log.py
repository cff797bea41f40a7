"""One structured line per event: JSON for machines, columns for a person at a terminal.

No prompt, no answer and no key is ever logged. The logger is made once and handed in.
"""

from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

Log = FilteringBoundLogger


def new_log(stream: TextIO) -> Log:
    """A logger that writes whole lines to `stream`. May be used from any thread."""
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=True)
        if stream.isatty()
        else structlog.processors.JSONRenderer()
    )
    log: Log = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        cache_logger_on_first_use=True,
    )
    return log

"""A measurement that ends before its time, by Ctrl-C or with its server, keeps its parts.

with kept_until_cut() as end:
    for part in parts:
        rows.append(await measured(part))
end.require(rows)
return Result(rows, cut=end.cut)
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import KvotaError


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a measurement is incomplete, as a piece of a sentence. `is_interrupt`: by Ctrl-C."""

    reason: str
    is_interrupt: bool


INTERRUPTED: Final = Cut("interrupted", is_interrupt=True)


@dataclass(slots=True)
class End:
    """How a measurement ended; without an error, as it should."""

    error: KvotaError | asyncio.CancelledError | None = None

    @property
    def cut(self) -> Cut | None:
        match self.error:
            case None:
                return None
            case KvotaError() as error:
                return Cut(error.message.rstrip("."), is_interrupt=False)
            case _:
                return INTERRUPTED

    def require(self, is_anything: object) -> None:
        """Raises again what cut it, where nothing was measured until then."""
        if self.error is not None and not is_anything:
            raise self.error


@contextmanager
def kept_until_cut() -> Iterator[End]:
    """The block ends quietly where it is cancelled, or where the server cannot be measured."""
    end = End()
    try:
        yield end
    except (KvotaError, asyncio.CancelledError) as error:
        end.error = error

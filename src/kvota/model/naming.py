"""What is wrong with a model, told to whoever can mend it: with the path in front."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvota.core.errors import ModelError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Complaints from inside begin with `path`, or with that of a file below it.

    What the operating system says of a file (no permission, a name that is too long) becomes a
    ModelError as well.
    """
    try:
        yield
    except ModelError as error:
        if error.message.startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error.message}") from error
    except OSError as error:
        place = error.filename or path
        raise ModelError(f"{place}: cannot be read: {error.strerror or error}.") from error

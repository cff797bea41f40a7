"""A process that counts usage as fast as it can and says after each line that it was kept.

    python -m tests.support.usage_writer DIRECTORY DATABASE_URL KEY_ID

Writes the number of lines kept so far to standard output, eight bytes each. Flushes all the while.
Runs until it is killed: that is what it is for.
"""

import os
import sys
import threading
from pathlib import Path

from kvota.gateway.store.database import StoreUnusable, open_database
from kvota.gateway.store.usage import USAGE_TABLES, UsageStore
from kvota.gateway.usage import UsageBook, UsageLine


def main(directory: str, url: str, key_id: str) -> None:
    book = UsageBook(Path(directory), UsageStore(open_database(url, USAGE_TABLES)))
    threading.Thread(target=_flush, args=(book,), daemon=True).start()
    kept = 0
    while True:
        book.add(UsageLine(key_id=key_id, tenant="t", model="m", day=1, output_tokens=2))
        kept += 1
        os.write(1, kept.to_bytes(8))


def _flush(book: UsageBook) -> None:
    while True:
        try:
            book.flush()
        except StoreUnusable as error:  # another one is writing; the next flush comes at once
            os.write(2, f"{error.message}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

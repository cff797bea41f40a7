"""The garbage collector of a process that is loaded once and then serves for long."""

import gc


def spare_what_stays() -> None:
    """What is loaded by now lives as long as the process; the collector need not see it again.

    A look at all of it would hold up every stream for tens of milliseconds. Requests leave few
    cycles behind, so it may look for those less often, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)

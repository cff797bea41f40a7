"""TCP connections whose other side is gone without a word: a machine that lost its power, a cable.

    we have sent, and nothing is acknowledged    TCP_USER_TIMEOUT   cut after `GONE_AFTER_S`
    neither side has sent anything               keepalive probes   from `SILENT_S` on, cut by then

Without this the kernel goes on for a quarter of an hour while data waits, and for ever while none
does. It also cuts a peer that lives but takes nothing; that is a slow reader, which we cut sooner
and with an outcome of its own (`send_timeout_s`). An option that a platform lacks is left out.

Set on a listening socket, Linux gives it to every connection that it accepts.
"""

import socket
from typing import Final

GONE_AFTER_S: Final = 40.0
SOONER_S: Final = 10.0  # a slow reader is cut by us
NUM_PROBES: Final = 5
_SILENT_SHARE: Final = 3 / 8  # of it, before the first probe; the rest is for the probes


def gone_after_s(send_timeout_s: float) -> float:
    """How long a peer may be gone, where slow readers have so long."""
    return max(GONE_AFTER_S, send_timeout_s + SOONER_S)


def notice_vanished(connection: socket.socket, gone_after_s: float = GONE_AFTER_S) -> None:
    """Let the kernel cut it when its peer has been gone for so long."""
    silent_s = gone_after_s * _SILENT_SHARE
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(connection, "TCP_KEEPIDLE", silent_s)
    _set(connection, "TCP_KEEPINTVL", (gone_after_s - silent_s) / NUM_PROBES)
    _set(connection, "TCP_KEEPCNT", NUM_PROBES)
    _set(connection, "TCP_USER_TIMEOUT", 1000 * gone_after_s)


def _set(connection: socket.socket, name: str, value: float) -> None:
    option = getattr(socket, name, None)
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))

"""The other side of a TCP connection vanishes: it neither answers nor acknowledges, for ever.

What a machine without power looks like from outside. Its kernel is told to drop whatever arrives
for the socket (a classic BPF program of one instruction: accept zero bytes), which needs no
privilege; nothing may be sent from it either, of course.
"""

import ctypes
import socket
import struct
import sys

import pytest

_SO_ATTACH_FILTER = 26
_RETURN_ZERO = struct.pack("HBBI", 0x06, 0, 0, 0)

GONE_AFTER_S = 1.0  # for the kernel of the side that stays; its clocks are coarse

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops for one socket")


def vanish(connection: socket.socket) -> None:
    """From here on nobody is there. Keep it open: closing would send a last word."""
    program = ctypes.create_string_buffer(_RETURN_ZERO)
    pointer = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)

"""Connections as no HTTP client makes them: cut, half-closed, dawdling, or not HTTP at all."""

import socket
import struct
from typing import Any

import msgspec

from tests.support.live_node import LiveNode, until

TIMEOUT_S = 20.0


class RawConnection:
    """One TCP connection to a port of this machine. Use as a context manager, or close it."""

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        """`receive_bytes` bounds what the kernel takes in for a test that does not read."""
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_bytes is not None:  # only in time before the connection is made
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.port: int = self.socket.getsockname()[1]

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to the read that brings `mark`."""
        seen = b""
        while mark not in seen:
            part = self.socket.recv(65536)
            assert part, seen
            seen += part
        return seen

    def read_all(self) -> bytes:
        """Everything until the server closes."""
        parts: list[bytes] = []
        try:
            while part := self.socket.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass  # it had unread bytes of ours when it closed
        return b"".join(parts)

    def close(self, *, reset: bool = False) -> None:
        """Close politely, or with a TCP reset."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()


class RawPost(RawConnection):
    """A request whose connection can be cut at any moment."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(port)
        self.send(post_bytes(path, body))

    def leave(self, node: LiveNode, *, reset: bool = False) -> None:
        """Close while the request is open, and return when the node has been told to stop it.

        Through a gateway that is two connections later than the close, however long they take.
        """
        num_wanted = node.num_wanted
        self.close(reset=reset)
        until(lambda: self.port not in node.client_ports, "the close to be seen")
        until(lambda: node.num_wanted < num_wanted, "the work to be stopped")


def post_bytes(path: str, body: dict[str, Any], *, headers: str = "") -> bytes:
    """A complete POST request."""
    content = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content

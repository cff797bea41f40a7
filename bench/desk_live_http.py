"""Plain requests without a body, beside the load: to look and to cancel."""

import asyncio


async def get_json(port: int, path: str) -> bytes:
    """The body of a GET. Raises OSError when nobody answers."""
    return (await _exchange(port, "GET", path)).partition(b"\r\n\r\n")[2]


async def delete(port: int, path: str) -> int:
    """The status of a DELETE; 404 when there is nothing of that name any more."""
    return int((await _exchange(port, "DELETE", path)).split(b" ", 2)[1])


async def _exchange(port: int, method: str, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        return await reader.read()
    finally:
        writer.close()

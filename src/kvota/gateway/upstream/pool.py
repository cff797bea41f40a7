"""The connections to one backend: opened when none is idle, kept for a while, never too many.

    channel = await pool.take(timeout_s)
    try: …                                 # one request, one answer
    finally: pool.give_back(channel)       # kept if its answer was read to the end, else closed

The connection used last is used next, so what a burst has opened falls idle and is closed again.
"""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from math import inf
from typing import Final
from urllib.parse import urlsplit

from kvota.edge.liveness import notice_vanished
from kvota.gateway.upstream.channel import Channel, ChannelError

LINGER_S: Final = 1.0  # for the end of an answer after its [DONE], so that the connection is kept


@dataclass(frozen=True, slots=True)
class Address:
    """Where connections go. `tls`: None for plain ones."""

    host: str
    port: int
    unix_socket: str | None = None
    tls: ssl.SSLContext | None = None


def address_of(url: str, *, unix_socket: str | None, verify_tls: bool) -> Address:
    """Of an http(s) URL. Raises ValueError for what names no host and port."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("it names no host")
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    return Address(parts.hostname, port, unix_socket, _tls(verify=verify_tls) if is_tls else None)


class Pool:
    """Built anywhere; used on one event loop."""

    def __init__(self, address: Address, *, connections_max: int, keep_alive_s: float) -> None:
        self._address = address
        self._keep_alive_s = keep_alive_s
        self._places = asyncio.Semaphore(connections_max)  # for those that are busy
        self._busy: set[Channel] = set()
        self._ending: set[asyncio.Task[None]] = set()  # of busy ones whose answer nobody reads on
        self._idle: list[tuple[Channel, float]] = []  # and since when; the last one newest
        self._sweeping: asyncio.TimerHandle | None = None
        self._answered: str | None = None  # the address that was reached last
        self._is_closed = False

    async def take(self, timeout_s: float) -> Channel:
        """A connection that nobody else uses; its `num_requests` says whether it is fresh.

        Waits up to `timeout_s`, for a place and to connect. Raises TimeoutError and OSError.
        """
        if self._places.locked():
            loop = asyncio.get_running_loop()
            end_s = loop.time() + timeout_s
            async with asyncio.timeout_at(end_s):
                await self._places.acquire()
            timeout_s = end_s - loop.time()
        else:
            await self._places.acquire()  # at once
        try:
            channel = self._kept() or await self._opened(timeout_s)
            if self._is_closed:  # meanwhile
                channel.close()
                raise ConnectionAbortedError("its connections are being closed")
        except BaseException:  # cancelled as well: the place is for the next one
            self._places.release()
            raise
        self._busy.add(channel)
        return channel

    def give_back(self, channel: Channel, *, sees_end: bool = False) -> None:
        """Idempotent. With `sees_end` it is busy until its answer has ended, which must be soon."""
        if channel not in self._busy:
            return
        if sees_end and not channel.is_complete:
            task = asyncio.get_running_loop().create_task(self._see_end(channel))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            return
        self._busy.discard(channel)
        self._places.release()
        if not channel.is_reusable:
            channel.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((channel, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._keep_alive_s, self._sweep)

    async def _see_end(self, channel: Channel) -> None:
        try:
            with contextlib.suppress(TimeoutError, ChannelError):
                async with asyncio.timeout(LINGER_S):
                    while await channel.piece(inf):
                        pass
        finally:
            self.give_back(channel)

    def close(self) -> None:
        """Close every connection, busy or not. None can be taken any more."""
        self._is_closed = True
        self.close_idle()
        for channel in list(self._busy):
            channel.close()

    def close_idle(self) -> None:
        """Close the connections that nobody uses now."""
        for channel, _ in self._idle:
            channel.close()
        self._idle.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def _kept(self) -> Channel | None:
        oldest_s = asyncio.get_running_loop().time() - self._keep_alive_s
        while self._idle:
            channel, since_s = self._idle.pop()
            if channel.is_reusable and since_s > oldest_s:
                return channel
            channel.close()
        return None

    async def _opened(self, timeout_s: float) -> Channel:
        address, loop = self._address, asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if address.unix_socket is not None:
                _, channel = await loop.create_unix_connection(
                    Channel, address.unix_socket,
                    ssl=address.tls, server_hostname=address.host if address.tls else None,
                )  # fmt: skip
            else:
                channel = await self._dialled(address.host, address.port, timeout_s)
        return channel

    async def _dialled(self, host: str, port: int, timeout_s: float) -> Channel:
        """At one of the name's addresses, the one that answered last first. Each but the last is
        tried for an equal part of the time: behind one of several there may be nobody, in silence.
        """
        loop, tls = asyncio.get_running_loop(), self._address.tls
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        names = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        names.sort(key=lambda name: name != self._answered)
        for name in names:
            is_last = name == names[-1]
            try:
                async with asyncio.timeout(None if is_last else timeout_s / len(names)):
                    transport, channel = await loop.create_connection(
                        Channel, name, port, ssl=tls, server_hostname=host if tls else None
                    )
            except OSError:  # TimeoutError is one
                if is_last:
                    raise
                continue
            self._answered = name
            notice_vanished(transport.get_extra_info("socket"))
            return channel
        raise OSError(f"{host} has no address")

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._keep_alive_s
        kept = [(one, since_s) for one, since_s in self._idle if since_s > oldest_s]
        for channel, since_s in self._idle:
            if since_s <= oldest_s:
                channel.close()
        self._idle = kept
        self._sweeping = loop.call_later(self._keep_alive_s, self._sweep) if kept else None


def _tls(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

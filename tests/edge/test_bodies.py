"""What all bodies together may take: they come before anybody knows what they are good for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from starlette.types import Receive, Scope, Send

from kvota.core.errors import KvotaError
from kvota.edge.exchange import SMALL_BODY_BYTES, Exchange
from kvota.edge.problems import error_headers, error_response
from kvota.edge.settings import EdgeSettings
from tests.edge.test_attacks import PATIENCE_S, POST, serving, statuses

LARGE = 3 * SMALL_BODY_BYTES
SETTINGS = EdgeSettings(max_body_bytes=20 * LARGE, max_bodies_bytes=2 * LARGE)


def request(size: int) -> bytes:
    return POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size


class Held:
    """Answers nobody before `release`; `num_taken` bodies have been taken."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_taken = 0
        self.changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, SETTINGS)
        try:
            await exchange.body()
            async with self.changed:
                self.num_taken += 1
                self.changed.notify_all()
            await self.release.wait()
            await exchange.send_whole(200, b"{}")
        except KvotaError as error:
            headers = error_headers(error, Random(1))
            await exchange.respond(error.status, error_response(error), headers)

    async def taken(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.num_taken == number)


@asynccontextmanager
async def sent(port: int, content: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    try:
        yield reader
    finally:
        writer.close()


async def answer_to(port: int, content: bytes) -> bytes:
    async with sent(port, content) as reader, asyncio.timeout(PATIENCE_S):
        return await reader.read()


async def until_answered(port: int, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while statuses(await answer_to(port, request(LARGE))) != [status]:
            pass


async def test_beyond_the_limit_of_all_bodies_only_small_ones_are_taken() -> None:
    app = Held()
    async with serving(app) as port:
        async with sent(port, request(LARGE)) as one, sent(port, request(LARGE)) as two:
            await app.taken(2)
            async with sent(port, request(LARGE)) as three:  # the bodies of others are at the limit
                await app.taken(3)
                refused = await answer_to(port, request(LARGE))
                assert statuses(refused) == [503]
                assert b"queue_full" in refused
                assert b"retry-after: " in refused
                async with sent(port, request(SMALL_BODY_BYTES)) as small:
                    await app.taken(4)
                    app.release.set()
                    for reader in (one, two, three, small):
                        assert statuses(await reader.read()) == [200]
        assert statuses(await answer_to(port, request(LARGE))) == [200]


async def test_a_body_on_its_way_counts_and_goes_with_its_client() -> None:
    app = Held()
    app.release.set()
    async with serving(app) as port:
        halves = [request(2 * LARGE)[:-LARGE] for _ in range(3)]
        async with sent(port, halves[0]), sent(port, halves[1]), sent(port, halves[2]):
            await until_answered(port, 503)  # once all of the halves have come
        await until_answered(port, 200)


async def test_a_body_larger_than_all_may_be_is_taken_where_it_is_alone() -> None:
    app = Held()
    app.release.set()
    async with serving(app) as port:
        assert statuses(await answer_to(port, request(5 * LARGE))) == [200]

"""Databases and a Redis for the tests of the door, and fake backends that close with the test."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from kvota.gateway.store import database, redis_limits
from kvota.gateway.store.database import sqlite_url
from tests.support import services
from tests.support.fake_backend import FakeBackend

PATIENCE_S = 60  # with a database or a Redis on a busy machine


@pytest.fixture(scope="session")
def postgres_directory() -> Iterator[str]:
    with services.postgres() as directory:
        yield directory


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    with services.redis() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An empty database; every test that asks for one runs on both kinds."""
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", PATIENCE_S)
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "kvota.db")
    directory: Any = request.getfixturevalue("postgres_directory")
    return services.new_database(directory, f"kvota_{uuid.uuid4().hex}")


@pytest.fixture
async def redis_url(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """An empty Redis."""
    monkeypatch.setattr(redis_limits, "TIMEOUT_S", PATIENCE_S)
    client = redis.asyncio.Redis.from_url(redis_server)
    await client.flushall()
    yield redis_server
    await client.aclose()


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """What is entered here is left after the test."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def a(closing: AsyncExitStack) -> FakeBackend:
    return await closing.enter_async_context(FakeBackend())


@pytest.fixture
async def b(closing: AsyncExitStack) -> FakeBackend:
    return await closing.enter_async_context(FakeBackend())


@pytest.fixture
async def backend(closing: AsyncExitStack) -> FakeBackend:
    return await closing.enter_async_context(FakeBackend())

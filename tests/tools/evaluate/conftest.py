from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.support.fake_backend import FakeBackend


@pytest.fixture
async def backends() -> AsyncIterator[tuple[FakeBackend, FakeBackend]]:
    """Two servers; a test says what they serve."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(FakeBackend())
        second = await stack.enter_async_context(FakeBackend())
        yield first, second

from collections.abc import AsyncIterator

import pytest

from tests.support.counting_backend import counting, tokenizing
from tests.support.fake_backend import FakeBackend


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    """It answers at once, with as many tokens as are asked for."""
    async with FakeBackend() as made:
        made.script = counting
        made.overrides["/tokenize"] = tokenizing
        yield made

"""A block that is cut short ends once, and its task goes on as if it had never been cancelled."""

import asyncio

import pytest

from kvota.edge.cutting import CutScope


async def _run(scope: CutScope, waits_for: asyncio.Future[None] | None = None) -> bool:
    """True: the block was cut."""
    scope.begin()
    kind: type[BaseException] | None = None
    try:
        await (waits_for or asyncio.get_running_loop().create_future())
    except BaseException as error:
        kind = type(error)
        if not scope.end(kind):
            raise
        return True
    assert not scope.end(kind)
    return False


async def test_a_block_that_nobody_cuts_ends_by_itself() -> None:
    scope, done = CutScope(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(_run(scope, done))
    await asyncio.sleep(0)
    done.set_result(None)
    assert not await running
    scope.cut()  # too late, and no harm
    await asyncio.sleep(0)


@pytest.mark.parametrize("num_cuts", [1, 3])
async def test_a_block_that_is_cut_ends_and_its_task_lives_on(num_cuts: int) -> None:
    scope = CutScope()
    running = asyncio.create_task(_run(scope))
    await asyncio.sleep(0)
    for _ in range(num_cuts):
        scope.cut()
    assert await running
    assert running.cancelling() == 0


async def test_a_block_that_was_cut_before_it_began_ends_as_soon_as_it_waits() -> None:
    scope = CutScope()
    scope.cut()
    assert await _run(scope)
    await asyncio.sleep(0)  # not cancelled again


async def test_a_cut_from_inside_does_not_reach_beyond_the_block() -> None:
    scope = CutScope()
    scope.begin()
    scope.cut()
    assert not scope.end(None)
    await asyncio.sleep(0)


async def test_an_exception_of_the_blocks_own_is_not_taken_for_the_cut() -> None:
    scope = CutScope()
    scope.begin()
    scope.cut()
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        assert not scope.end(ValueError)
    await asyncio.sleep(0)


async def test_a_cancellation_by_others_is_not_swallowed() -> None:
    scope = CutScope()
    running = asyncio.create_task(_run(scope))
    await asyncio.sleep(0)
    scope.cut()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_blocks_within_blocks_are_cut_one_by_one() -> None:
    outer, inner = CutScope(), CutScope()

    async def both() -> str:
        outer.begin()
        try:
            assert await _run(inner)
            await asyncio.sleep(10)
        except asyncio.CancelledError as error:
            if outer.end(type(error)):
                return "both"
            raise
        return "inner"

    running = asyncio.create_task(both())
    await asyncio.sleep(0)
    inner.cut()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outer.cut()
    assert await running == "both"

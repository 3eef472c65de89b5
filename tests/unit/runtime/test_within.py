"""Waits of limited time."""

import asyncio

import pytest

from moc.runtime.within import within


def test_a_result_in_time_and_one_that_is_not():
    async def body():
        assert [await within(asyncio.sleep(0, "here"), limit) for limit in (60.0, None)] == ["here", "here"]
        late = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            await within(late, 0.01)
        assert late.cancelled()

    asyncio.run(body())


async def _fails() -> None:
    raise OSError("broken")


def test_a_failure_is_raised():
    with pytest.raises(OSError, match="broken"):
        asyncio.run(within(_fails(), 60.0))


@pytest.mark.parametrize("steps", range(6))
def test_a_cancellation_that_coincides_with_the_result_is_not_lost(steps):
    async def body():
        result = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(result, 60.0))
        await asyncio.sleep(0.01)
        result.set_result("here")
        for _ in range(steps):
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() != ended

    asyncio.run(body())

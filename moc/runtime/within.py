"""Waits of limited time that can always be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(awaited: Awaitable[T], seconds: float | None) -> T:
    """Returns what an awaitable returns, if it does so within some seconds; None waits forever.

    Cancelling it cancels the awaitable and raises CancelledError, also if the result has come at that moment.
    ``asyncio.wait_for`` returns the result then before Python 3.12, and the task that was cancelled goes on.

    Raises:
        TimeoutError: it has not; it is cancelled.
    """
    if seconds is None:
        return await awaited  # a task would take as long as many a message
    task = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not done:
        await _cancel(task)
        raise TimeoutError
    return task.result()


async def _cancel(task: asyncio.Future) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

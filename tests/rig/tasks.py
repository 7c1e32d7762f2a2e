"""Small tasks that tests start in a nursery."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio


async def call_later(delay_s: float, function: Callable[..., object], *args: Any) -> None:
    await trio.sleep(delay_s)
    function(*args)


async def append_result(into: list[Any], function: Callable[..., Awaitable[object]], *args: Any) -> None:
    into.append(await function(*args))


async def expect_error(error: type[Exception], function: Callable[..., Awaitable[object]], *args: Any) -> None:
    with pytest.raises(error):
        await function(*args)

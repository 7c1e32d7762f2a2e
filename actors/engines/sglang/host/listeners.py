"""Listeners of other processes, for which the host waits in place of its scheduler."""

from __future__ import annotations

import asyncio

from protocol.errors import EngineRefused
from protocol.messages.weights import JOIN_WITHIN_S

CONNECT_S = 5.0
LISTENS_AGAIN_S = 0.1


async def wait_listens(address: str, port: int, within_s: float) -> None:
    """Wait until something listens there; raises `EngineRefused` if nothing does.

    The scheduler would wait for it, and answer nobody.
    """
    now = asyncio.get_running_loop().time
    ends_at = now() + min(within_s, JOIN_WITHIN_S)
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            if now() >= ends_at:
                why = f"nothing listens at port {port} of {address[:128]}: {error}"
                raise EngineRefused(why, param="address") from None
            await asyncio.sleep(LISTENS_AGAIN_S)
        else:
            writer.close()
            return

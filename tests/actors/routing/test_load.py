"""When a worker gets one more request."""

from __future__ import annotations

import pytest

from actors.routing.load import Load


@pytest.mark.parametrize(("busy", "kv_tokens", "full"), [(2, 512, True), (2, 513, False), (4, 513, True)])
def test_pending_prompts_bound_a_worker_until_its_requests_exceed_its_memory(
    busy: int, kv_tokens: int, *, full: bool
) -> None:
    """Prompts that waited for memory in an engine kept every other key from it."""
    load = Load("w", busy, 4, kv_tokens=kv_tokens, kv_tokens_max=512, pending=100, pending_max=64)
    assert load.full is full

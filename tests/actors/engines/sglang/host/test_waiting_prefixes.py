"""The prefixes of waiting requests, touched on arrival; tests/system/sglang has the same with the real engine."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, field

from actors.engines.sglang.host.waiting_prefixes import touch_on_arrival


@define(eq=False, slots=False)
class Scheduler:
    """SGLang's, as far as it queues requests."""

    tree_cache: str = "cache"
    waiting: list[tuple[object, ...]] = field(factory=list)

    def receive(self, req: str, **named: object) -> None:
        self._add_request_to_queue(req, **named)

    def _add_request_to_queue(self, req: str, *arguments: object, **named: object) -> None:
        self.waiting.append((req, arguments, named))


@pytest.mark.parametrize("evicts_oldest", [True, False])
def test_a_request_that_arrives_touches_what_it_will_find_if_the_oldest_is_evicted(*, evicts_oldest: bool) -> None:
    patched: Any = type("PatchedScheduler", (Scheduler,), {})
    touched = list[tuple[object, object, int]]()

    def touch(req: object, cache: object) -> None:
        touched.append((req, cache, len(scheduler.waiting)))

    touch_on_arrival(patched, touch, lambda: evicts_oldest)
    scheduler = patched()
    scheduler.receive("first")
    scheduler.receive("second", is_retracted=True)
    assert scheduler.waiting == [("first", (), {}), ("second", (), {"is_retracted": True})]
    assert touched == ([("first", "cache", 1), ("second", "cache", 2)] if evicts_oldest else [])

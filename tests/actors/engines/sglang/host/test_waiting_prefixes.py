"""The prefixes of the next requests, touched before a step; tests/system/sglang has the same with the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, field

from actors.engines.sglang.host.waiting_prefixes import touch_next
from protocol.cost import PROTECTED_MAX


@define(eq=False, slots=False)
class SchedulePolicy:
    """SGLang's, as far as it orders the waiting requests."""

    tree_cache: str = "cache"
    named: list[object] = field(factory=list)

    def calc_priority(self, waiting_queue: Sequence[object], *arguments: object, **named: object) -> None:
        assert isinstance(waiting_queue, list)
        waiting_queue.sort()
        self.named.append((arguments, named))


@pytest.mark.parametrize("evicts_oldest", [True, False])
def test_the_next_requests_touch_what_they_will_find_and_the_first_one_last(*, evicts_oldest: bool) -> None:
    patched: Any = type("PatchedPolicy", (SchedulePolicy,), {})
    touched = list[tuple[object, object]]()
    touch_next(patched, lambda request, cache: touched.append((request, cache)), lambda: evicts_oldest)
    policy = patched()
    policy.calc_priority([2, 3, 1], "running", processed_tokens=7)
    assert policy.named == [(("running",), {"processed_tokens": 7})]
    assert touched == ([(3, "cache"), (2, "cache"), (1, "cache")] if evicts_oldest else [])


def test_of_many_requests_the_next_few_are_touched() -> None:
    patched: Any = type("PatchedPolicy", (SchedulePolicy,), {})
    touched = list[object]()
    touch_next(patched, lambda request, _: touched.append(request), lambda: True)
    patched().calc_priority([*range(1_000)])
    assert touched == [*reversed(range(PROTECTED_MAX))]

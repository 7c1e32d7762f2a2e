"""The prefixes of the next requests, touched before a step; tests/system/sglang has the same with the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from actors.engines.sglang.host.waiting_prefixes import touch_next
from protocol.cost import PROTECTED_MAX


@define(eq=False, slots=False)
class SchedulePolicy:
    """SGLang's, as far as it touches prefixes."""

    touched: list[object] = field(factory=list)

    def _touch_waiting_prefixes(self, policy: object, waiting_queue: Sequence[object]) -> None:
        if policy == "first come":
            self.touched += reversed(waiting_queue)


@pytest.mark.parametrize(
    ("order", "waiting", "touched"),
    [
        ("first come", [1, 2, 3], [3, 2, 1]),
        ("first come", [*range(1_000)], [*reversed(range(PROTECTED_MAX))]),
        ("longest prefix", [1, 2, 3], []),
    ],
    ids=["all", "the next few", "none where SGLang touches none"],
)
def test_in_every_pass_the_next_requests_touch_what_they_will_find_and_the_first_one_last(
    order: str, waiting: list[int], touched: list[int]
) -> None:
    policies: Any = SimpleNamespace(
        SchedulePolicy=type("PatchedPolicy", (SchedulePolicy,), {}), WAITING_PREFIX_REFRESH_INTERVAL=32
    )
    touch_next(policies)
    assert policies.WAITING_PREFIX_REFRESH_INTERVAL == 1
    policy = policies.SchedulePolicy()
    policy._touch_waiting_prefixes(order, waiting)  # noqa: SLF001
    assert policy.touched == touched

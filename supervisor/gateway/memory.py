"""The memory that all clients of a gateway share: one budget for each purpose."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from supervisor.gateway.histories import ResponseHistories
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.memory_budgets import Backlogs, MemoryBudget

ANSWER_BYTES_FREE = 64 * 1024
"""Of each answer in one piece, so that short ones are sent when the budget is used up; some 8,000 tokens."""


@frozen
class GatewayMemory:
    """The budgets of one gateway."""

    bodies: MemoryBudget  # of requests
    answers: MemoryBudget  # of responses that are kept until they are complete
    histories: ResponseHistories
    backlogs: Backlogs

    @classmethod
    def within(cls, limits: Callable[[], GatewayLimits]) -> GatewayMemory:
        """Return budgets that are bounded by the limits at each moment."""
        answers, share = "answers in one piece (answers_bytes_max)", lambda: limits().key_share_max
        return cls(
            bodies=MemoryBudget("requests (bodies_bytes_max)", lambda: limits().bodies_bytes_max, share),
            answers=MemoryBudget(answers, lambda: limits().answers_bytes_max, share),
            histories=ResponseHistories(lambda: limits().histories_bytes_max),
            backlogs=Backlogs(lambda: limits().backlogs_bytes_max),
        )

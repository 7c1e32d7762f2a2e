"""The cost of a chat template and the size of its prompts, learned by rendering a few short conversations.

The cost of most templates grows with the messages, and that of some with their square, since they look through all
messages for each. So the steps of a conversation are known before it is rendered: long work waits with long work. A
conversation that a model can hold is refused for its steps only where they take some tens of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TypeAlias

from attrs import frozen

from actors.text.template_facts import Render, TemplateMessage
from actors.text.template_steps import STEPS_MAX, Steps

RenderCounted: TypeAlias = Callable[[Sequence[TemplateMessage], Steps], str]
"""Renders a conversation, counting its steps; raises anything for one that is refused."""

TRIED = (8, 16, 24)  # messages
# Conversations of other shapes take a few times the steps of those that were tried, at most.
ALLOWED_FACTOR = 4
# The most steps of any rendering, some tens of seconds. Published templates take less for 32k tokens of short messages.
RENDERING_STEPS_MAX = 10_000_000
# A rendering with more steps is not repeated, whether to check a prompt or to find what is at fault.
REPEATED_STEPS_MAX = 1_000_000

_SHAPES = (("user", "assistant"), ("user",), ("assistant",), ("system", "user"))


@frozen
class TemplateCost:
    """The steps of a rendering as a function of the number of messages: `fixed + each * n + square * n * n`."""

    fixed: float = 0.0
    each: float = 0.0
    square: float = 0.0

    def steps(self, messages: int) -> int:
        """Return about how many steps a conversation of so many messages takes."""
        return int(self.fixed + (self.each + self.square * messages) * messages)

    def steps_max(self, messages: int) -> int:
        """Return how many steps a conversation of so many messages may take."""
        return min(RENDERING_STEPS_MAX, max(STEPS_MAX, ALLOWED_FACTOR * self.steps(messages)))


def learn_cost(render: RenderCounted) -> TemplateCost:
    """Return the cost of a template, that of the most expensive of the shapes that it does not refuse."""
    costs = [cost for roles in _SHAPES if (cost := _cost(render, roles)) is not None]
    return TemplateCost(
        fixed=max((cost.fixed for cost in costs), default=0.0),
        each=max((cost.each for cost in costs), default=0.0),
        square=max((cost.square for cost in costs), default=0.0),
    )


def fewest_turn_tokens(render: Render, count_tokens: Callable[[str], int]) -> int:
    """Return how many tokens each further message of a conversation has at least, even one without a text."""
    fewest = [tokens for roles in _SHAPES if (tokens := _turn_tokens(render, count_tokens, roles)) is not None]
    return min(fewest, default=0)


def _turn_tokens(render: Render, count_tokens: Callable[[str], int], roles: Sequence[str]) -> int | None:
    """Return the tokens of a message without a text, where these roles take turns; None if they are refused."""
    short, long = TRIED[0], TRIED[-1]
    try:
        prompts = [
            render([{"role": role, "content": ""} for role in islice(cycle(roles), count)]) for count in (short, long)
        ]
    except Exception:  # noqa: BLE001  # a template may raise anything to refuse a conversation
        return None
    return max(0, count_tokens(prompts[1]) - count_tokens(prompts[0])) // (long - short)


def _cost(render: RenderCounted, roles: Sequence[str]) -> TemplateCost | None:
    """Return the cost of conversations in which these roles take turns, None if they are refused."""
    taken = []
    for count in TRIED:
        steps = Steps()
        messages = [{"role": role, "content": "x"} for role in islice(cycle(roles), count)]
        try:
            render(messages, steps)
        except Exception:  # noqa: BLE001  # a template may raise anything to refuse a conversation
            return None
        taken.append(steps.taken)
    # The parabola through three points at equal distances.
    low, middle, high = taken
    width = TRIED[1] - TRIED[0]
    square = max(0.0, (high - 2 * middle + low) / (2 * width * width))
    each = max(0.0, (high - low) / (2 * width) - 2 * square * TRIED[1])
    return TemplateCost(max(0.0, low - (each + square * TRIED[0]) * TRIED[0]), each, square)

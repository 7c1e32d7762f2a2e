"""Facts about what a chat template does with texts, learned by rendering a few sentinels when its model is loaded.

No document says how a template treats a second system message, or a text in several parts, and templates differ. So
each is tried with texts that occur nowhere else, and what comes out is compared with what went in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TypeAlias

from attrs import Factory, frozen

TemplateMessage: TypeAlias = Mapping[str, object]

Render: TypeAlias = Callable[[Sequence[TemplateMessage]], str]
"""Renders a conversation for an answer that begins with it; raises anything for one that is refused."""

SENTINEL = "90417{:06}83526"  # digits, which no template escapes, trims or writes in another case
FIRST, SECOND, LAST = map(SENTINEL.format, range(3))


class Takes(Enum):
    """The forms in which a template takes the content of a message."""

    TEXT = auto()  # only a text: parts are joined
    PARTS = auto()  # only a list of parts
    BOTH = auto()


@frozen
class TemplateFacts:
    """The ways of a chat template with the texts of a conversation."""

    renders_text: bool = True  # the text of a user reaches the prompt
    several_systems: bool = True  # each of several leading system messages is rendered
    instructions: str = "system"  # the role of system's and developers' messages
    takes: Mapping[str, Takes] = Factory(dict)  # by role; a role that is missing takes texts
    question_join: str | None = None  # joins instructions to the last question, if it renders them there alone


def learn(render: Render) -> TemplateFacts:
    """Return the facts about a template."""
    system = "system"
    user = {"role": "user", "content": LAST}
    takes = {
        "user": _takes(render, (), "user", ()),
        "assistant": _takes(render, (user,), "assistant", (user,)),
        "system": _takes(render, (), "system", (user,)),
    }
    shaped = _Shaped(render, takes)
    if not shaped.keeps((system, FIRST), ("user", LAST)) and shaped.keeps(("developer", FIRST), ("user", LAST)):
        system = "developer"
    return TemplateFacts(
        renders_text=shaped.keeps(("user", LAST)),
        several_systems=shaped.keeps((system, FIRST), (system, SECOND), ("user", LAST)),
        instructions=system,
        takes=takes,
        question_join=shaped.question_join(system),
    )


@frozen
class _Shaped:
    render: Render
    takes: Mapping[str, Takes]

    def keeps(self, *turns: tuple[str, str]) -> bool:
        """Return whether the texts of these turns reach the prompt, in their order."""
        return in_order(self.rendered(*turns), [text for _, text in turns])

    def rendered(self, *turns: tuple[str, str]) -> str:
        """Return the prompt of these turns, an empty one if they are refused."""
        messages = [
            {"role": role, "content": [part_of(text)] if self.takes.get(role) is Takes.PARTS else text}
            for role, text in turns
        ]
        return _rendered(self.render, messages)

    def question_join(self, system: str) -> str | None:
        """Return the blanks between instructions and a last question, None if instructions are rendered elsewhere too.

        Mistral's older templates leave them out once an answer or a result is last.
        """
        answered = self.rendered((system, FIRST), ("user", SECOND), ("assistant", LAST))
        if FIRST in answered or not in_order(answered, (SECOND, LAST)):
            return None
        joined = re.search(rf"{FIRST}(\s*){LAST}", self.rendered((system, FIRST), ("user", LAST)))
        return None if joined is None else joined[1]


def part_of(text: str) -> dict[str, str]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


def in_order(prompt: str, texts: Sequence[str]) -> bool:
    """Return whether all texts are in the prompt, one after another."""
    place = 0
    for text in texts:
        if (found := prompt.find(text, place)) < 0:
            return False
        place = found + len(text)
    return True


def _takes(render: Render, before: Sequence[TemplateMessage], role: str, after: Sequence[TemplateMessage]) -> Takes:
    """Return in which forms the content of a message of this role can be."""

    def rendered(content: object) -> str:
        return _rendered(render, [*before, {"role": role, "content": content}, *after])

    as_text = rendered(FIRST)
    as_parts = rendered([part_of(FIRST), part_of(SECOND)])
    # A template that does not know lists may print one, with its brackets and keys.
    printed = any(as_parts.count(key) > as_text.count(key) for key in ("'type'", '"type"', "&#39;type&#39;"))
    if not in_order(as_parts, (FIRST, SECOND)) or printed:
        return Takes.TEXT
    return Takes.BOTH if FIRST in as_text else Takes.PARTS


def _rendered(render: Render, messages: Sequence[TemplateMessage]) -> str:
    try:
        return render(messages)
    except Exception:  # noqa: BLE001  # a template may raise anything to refuse a conversation
        return ""

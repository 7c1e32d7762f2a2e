"""The first text of a conversation that its rendered prompt leaves out.

A long text that is found in the prompt behind those before it is there. A short one may be found anywhere, and one that
the template has changed is not found at all. Then the conversation is rendered with sentinels in place of its texts:
that finds what the template leaves out whatever the texts are. If that is nothing, it is rendered with sentinels around
the texts: that finds what it leaves out because of them. So a conversation is rendered four times at most, and nearly
always once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import cast

from attrs import define, field

from actors.text.template_facts import SENTINEL, Render, TemplateMessage

CERTAIN_CHARACTERS_MIN = 24  # a text of so many is in a prompt only if it was put there
HEAD_CHARACTERS = 32
MOVED_MAX = 16  # texts that are looked for in the whole prompt: a template may move some to its beginning
SHAPES_MAX = 1_024
SHAPE_CHARACTERS_MAX = 512  # of a shape that is kept

_SENTINELS = re.compile(SENTINEL.replace("{:06}", r"(\d{6})"))
# What a template does with three repetitions of a few messages, it does with any number of them.
_REPEATED = re.compile(r"(.{1,4}?)\1{3,}", re.DOTALL)
REPETITIONS = 3


@define(eq=False)
class KeptTexts:
    """The law that every text reaches the prompt, and what is known already about one template."""

    _all_kept: dict[tuple[str, str], bool] = field(factory=dict)  # by the shapes of messages

    def first_lost(
        self, messages: Sequence[TemplateMessage], prompt: str, render: Render, options: object
    ) -> int | None:
        """Return the index of the first message with a text that is not in the prompt, None if all are there.

        `render` renders messages as the prompt was rendered; `options` are what else the prompt depends on.
        """
        missing, certain = _find(messages, prompt)
        if certain:
            return None
        try:
            lost = self._lost_by_shape(messages, render, options)
            if lost is None and missing is not None:
                lost = _lost_by_content(messages, render)
        except Exception:  # noqa: BLE001  # a template may raise anything to refuse a sentinel
            return missing
        return lost

    def _lost_by_shape(self, messages: Sequence[TemplateMessage], render: Render, options: object) -> int | None:
        shapes = list(map(_shape, messages))
        kept = range(len(shapes)) if len(shapes) <= REPETITIONS else _without_repetitions(shapes)
        key = (" ".join([shapes[index] for index in kept]), repr(options))
        if key not in self._all_kept:
            try:
                verdict = _first_left_out([messages[index] for index in kept], render) is None
            except Exception:  # noqa: BLE001  # a template may refuse a shorter conversation
                return _first_left_out(messages, render)
            if len(key[0]) + len(key[1]) > SHAPE_CHARACTERS_MAX:
                return None if verdict else _first_left_out(messages, render)
            if len(self._all_kept) >= SHAPES_MAX:
                self._all_kept.clear()
            self._all_kept[key] = verdict
        return None if self._all_kept[key] else _first_left_out(messages, render)


def _first_left_out(messages: Sequence[TemplateMessage], render: Render) -> int | None:
    """Return the index of the first message of which a template leaves out a text, even a sentinel."""
    seen = _seen(render(_marked(messages, lambda mark, _: mark)))
    numbers = count()
    for index, message in enumerate(messages):
        if any(next(numbers) not in seen for _ in _texts(message)):
            return index
    return None


def _find(messages: Sequence[TemplateMessage], prompt: str) -> tuple[int | None, bool]:
    """Return the index of the first message with a text that was not found, and whether all certainly are there."""
    place, moved, certain = 0, 0, True
    for index, message in enumerate(messages):
        content = message["content"]
        for whole in (content,) if isinstance(content, str) else _texts(message):
            text = whole.strip()
            # A short needle is found sooner, and nearly always where the whole text is.
            found = prompt.find(text[:HEAD_CHARACTERS], place)
            if found >= 0 and not prompt.startswith(text, found):
                found = prompt.find(text, found)
            if found >= 0:
                place = found + len(text)
                certain = certain and (len(text) >= CERTAIN_CHARACTERS_MIN or not text)
            elif moved < MOVED_MAX and text in prompt:
                moved, certain = moved + 1, False
            else:
                return index, False
    return None, certain


def _lost_by_content(messages: Sequence[TemplateMessage], render: Render) -> int | None:
    """Return the index of the first message of which the template leaves out a text because of what the text is."""
    begins = _seen(render(_marked(messages, lambda mark, text: mark + text)))
    ends = _seen(render(_marked(messages, lambda mark, text: text + mark)))
    numbers = count()
    for index, message in enumerate(messages):
        for _ in _texts(message):
            number = next(numbers)
            # Of an earlier answer many templates leave out the reasoning, which is its beginning.
            enough = any if message["role"] == "assistant" else all
            if not enough((number in begins, number in ends)):
                return index
    return None


def _marked(messages: Sequence[TemplateMessage], change: Callable[[str, str], str]) -> list[TemplateMessage]:
    """Return messages with a change of each text by a sentinel of its own."""
    numbers = count()
    return [_changed(message, lambda text: change(SENTINEL.format(next(numbers)), text)) for message in messages]


def _seen(prompt: str) -> set[int]:
    return set(map(int, _SENTINELS.findall(prompt)))


def _texts(message: TemplateMessage) -> Iterator[str]:
    """Yield the texts of a message that are not blank."""
    content = message["content"]
    if isinstance(content, str):
        if content.strip():
            yield content
        return
    for piece in cast("list[dict[str, str]]", content):
        if "text" in piece and piece["text"].strip():
            yield piece["text"]


def _changed(message: TemplateMessage, change: Callable[[str], str]) -> TemplateMessage:
    """Return a message with another text in place of each that is not blank."""

    def of(text: str) -> str:
        return change(text) if text.strip() else text

    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": of(content)}
    pieces = cast("list[dict[str, str]]", content)
    return {**message, "content": [{**one, "text": of(one["text"])} if "text" in one else one for one in pieces]}


def _shape(message: TemplateMessage) -> str:
    """Return what a template knows of a message without its texts."""
    content, role = message["content"], cast("str", message["role"])
    named = ":" if "name" in message else ""
    if isinstance(content, str):
        return role + named if content.strip() else f"{role}{named}0"
    pieces = cast("list[dict[str, str]]", content)
    return f"{role}{named}({','.join(['0' if not one.get('text', 'x').strip() else one['type'] for one in pieces])})"


def _without_repetitions(shapes: Sequence[str]) -> Sequence[int]:
    """Return the indices of the messages that are left if a few that are repeated are repeated no more than thrice."""
    letters: dict[str, str] = {}
    text = "".join([letters.setdefault(shape, chr(len(letters))) for shape in shapes])
    kept: list[int] = []
    begin = 0
    for match in _REPEATED.finditer(text):
        kept += range(begin, match.start() + REPETITIONS * len(match[1]))
        begin = match.end()
    return [*kept, *range(begin, len(shapes))]

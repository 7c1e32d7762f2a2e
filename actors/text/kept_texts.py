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
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import cast

from attrs import define, evolve, field, frozen

from actors.text.template_facts import Render, TemplateMessage

CERTAIN_CHARACTERS_MIN = 24  # a text of so many is in a prompt only if it was put there
HEAD_CHARACTERS = 32
MOVED_MAX = 16  # texts that are looked for in the whole prompt: a template may move some to its beginning
SHAPES_MAX = 1_024
SHAPE_BYTES = 16  # of the digest of a conversation's shape
THOUGHT_ENDS = "</think>"

_OWN = frozenset({"role", "content"})  # the keys of every message
_CALLS = "tool_calls"


@define(eq=False)
class KeptTexts:
    """The law that every text reaches the prompt, and what is known already about one template.

    `salt` has digits alone. A client that does not know it cannot write a sentinel.
    """

    salt: str = ""
    _all_kept: dict[bytes, bool] = field(factory=dict)  # by the shapes of messages

    def first_lost(
        self,
        messages: Sequence[TemplateMessage],
        prompt: str,
        render: Render,
        options: object,
        *,
        may_render: bool = True,
    ) -> int | None:
        """Return the index of the first message with a text that is not in the prompt, None if all are there.

        `render` renders messages as the prompt was rendered; `options` are what else the prompt depends on. Where it
        may not be rendered again, or the template refuses sentinels, what was found in the prompt counts.
        """
        missing, certain = _find(messages, prompt)
        if certain or not may_render:
            return missing
        probes, lost = _Probes(messages, render, self.salt), missing
        for probe in (partial(self._lost_by_shape, probes, options), probes.lost_by_content):
            try:
                lost = probe()
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001  # a template may raise anything to refuse a sentinel
                lost = missing
            else:
                if lost is not None or missing is None:
                    break
        return lost

    def _lost_by_shape(self, probes: _Probes, options: object) -> int | None:
        shape = " ".join([*map(_shape, probes.messages), repr(options)])
        key = blake2b(shape.encode(errors="surrogatepass"), digest_size=SHAPE_BYTES).digest()
        all_kept = self._all_kept.get(key)
        if all_kept is None:
            # What other conversations of this shape are served by cannot depend on this one's names and reasoning.
            all_kept = evolve(probes, messages=list(map(_neutral, probes.messages))).first_left_out() is None
            if len(self._all_kept) >= SHAPES_MAX:
                self._all_kept.clear()
            self._all_kept[key] = all_kept
        return None if all_kept else probes.first_left_out()


@frozen
class _Probes:
    """Renderings of a conversation with sentinels."""

    messages: Sequence[TemplateMessage]
    render: Render
    salt: str

    def first_left_out(self) -> int | None:
        """Return the index of the first message of which a template leaves out a text, even a sentinel."""
        seen = self._seen(lambda mark, _: mark)
        numbers = count()
        for index, message in enumerate(self.messages):
            if any(next(numbers) not in seen for _ in _texts(message)):
                return index
        return None

    def lost_by_content(self) -> int | None:
        """Return the index of the first message of which the template leaves out a text because of what the text is."""
        begins = self._seen(lambda mark, text: mark + text)
        ends = self._seen(lambda mark, text: text + mark)
        numbers = count()
        for index, message in enumerate(self.messages):
            for _ in _texts(message):
                number = next(numbers)
                # Of an earlier answer many templates leave out the reasoning, which is its beginning.
                enough = any if message["role"] == "assistant" else all
                if not enough((number in begins, number in ends)):
                    return index
        return None

    def _seen(self, change: Callable[[str, str], str]) -> set[int]:
        """Return the numbers of the sentinels that reach the prompt, where each changes a text."""
        before, after, numbers = f"90417{self.salt}", "83526", count()

        # Digits, which no template escapes, trims or writes in another case.
        def marked(text: str) -> str:
            return change(f"{before}{next(numbers):06}{after}", text)

        prompt = self.render([_changed(message, marked) for message in self.messages])
        return set(map(int, re.findall(rf"{before}(\d{{6}}){after}", prompt)))


def _find(messages: Sequence[TemplateMessage], prompt: str) -> tuple[int | None, bool]:
    """Return the index of the first message with a text that was not found, and whether all certainly are there."""
    place, moved, certain = 0, 0, True
    for index, message in enumerate(messages):
        content = message["content"]
        for whole in (content,) if isinstance(content, str) else _texts(message):
            text = whole.strip()
            found = _place(text, prompt, place)
            if found < 0 and message["role"] == "assistant" and THOUGHT_ENDS in text:
                # Of an earlier answer many templates leave out the reasoning.
                text = text.rpartition(THOUGHT_ENDS)[2].strip()
                found = _place(text, prompt, place)
            if found >= 0:
                place = found + len(text)
                certain = certain and (len(text) >= CERTAIN_CHARACTERS_MIN or not text)
            elif moved < MOVED_MAX and text in prompt:
                moved, certain = moved + 1, False
            else:
                return index, False
    return None, certain


def _place(text: str, prompt: str, start: int) -> int:
    # A short needle is found sooner, and nearly always where the whole text is.
    found = prompt.find(text[:HEAD_CHARACTERS], start)
    return found if found < 0 or prompt.startswith(text, found) else prompt.find(text, found)


def _texts(message: TemplateMessage) -> Iterator[str]:
    """Yield the texts of a message that are not blank."""
    content = message["content"]
    if isinstance(content, str):
        if content.strip():
            yield content
        return
    if content is None:
        return
    for piece in cast("list[dict[str, str]]", content):
        if "text" in piece and piece["text"].strip():
            yield piece["text"]


def _changed(message: TemplateMessage, change: Callable[[str], str]) -> TemplateMessage:
    """Return a message with another text in place of each that is not blank."""

    def of(text: str) -> str:
        return change(text) if text.strip() else text

    content = message["content"]
    if content is None:
        return message
    if isinstance(content, str):
        return {**message, "content": of(content)}
    pieces = cast("list[dict[str, str]]", content)
    return {**message, "content": [{**one, "text": of(one["text"])} if "text" in one else one for one in pieces]}


def _neutral(message: TemplateMessage) -> TemplateMessage:
    """Return a message with another value in place of each that is neither its role nor its content."""
    others: dict[str, object] = {key: "x" for key in message if key not in _OWN and key != _CALLS}
    if _CALLS in message:
        others[_CALLS] = list(map(_neutral_call, _calls(message)))
    return {"role": message["role"], "content": message["content"], **others}


def _calls(message: TemplateMessage) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", message[_CALLS])


def _neutral_call(call: dict[str, object]) -> dict[str, object]:
    function = cast("dict[str, object]", call["function"])
    arguments: object = "{}" if isinstance(function["arguments"], str) else {}
    return {**call, "id": "x00000000", "function": {"name": "x", "arguments": arguments}}


def _shape(message: TemplateMessage) -> str:
    """Return what a template knows of a message without its texts, its name and its reasoning."""
    content, role = message["content"], cast("str", message["role"])
    others = "".join([f":{key}" for key in message if key not in _OWN])
    if _CALLS in message:
        others += str(len(_calls(message)))
    if content is None:
        return f"{role}{others}"
    if isinstance(content, str):
        return f"{role}{others}" if content.strip() else f"{role}{others}0"
    pieces = cast("list[dict[str, str]]", content)
    return f"{role}{others}({','.join(['0' if not one.get('text', 'x').strip() else one['type'] for one in pieces])})"

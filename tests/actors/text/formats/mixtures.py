"""Random texts in each format: whole calls, reasoning, parts of both, and what resembles them."""

from __future__ import annotations

import random

from attrs import frozen

from actors.text.formats.table import AnswerFormat

COMMON = (
    "An oak",
    " ",
    "\n",
    "\n\n",
    "日本🙂",
    '"',
    "{",
    "}",
    "[",
    "]",
    "\\",
    "<",
    "|",
    ">",
    "a",
    "f",
    ": 1",
    ",",
    "'",
)
THINK = ("<think>", "</think>", "<think>\nHm.\n</think>\n\n", "<thin", "</think")


@frozen
class Mixture:
    """A format, and the fragments of its texts."""

    answers: AnswerFormat
    own: tuple[str, ...]

    def text(self, rng: random.Random) -> str:
        """Return a random text."""
        fragments = (rng.choice(self.own if rng.random() < 0.6 else COMMON) for _ in range(rng.randint(1, 12)))
        return "".join(self._damaged(fragment, rng) for fragment in fragments)

    def _damaged(self, fragment: str, rng: random.Random) -> str:
        """Return a fragment, now and then without its end, or without a character."""
        chance = rng.random()
        if chance < 0.1:
            return fragment[: rng.randint(0, len(fragment))]
        if chance < 0.15:
            place = rng.randrange(len(fragment))
            return fragment[:place] + fragment[place + 1 :]
        return fragment


MIXTURES: dict[str, Mixture] = {
    "hermes": Mixture(
        AnswerFormat("hermes", "think"),
        (
            *THINK,
            "<tool_call>",
            "</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>", "n": 3}}\n</tool_call>',
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            '{"name": "f", "arguments": {"a": "\\u00e9\\n", "n": -1.5e3}}',
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            '{"name": "f", "arguments": [1, {"b": [true, null]}]}',
        ),
    ),
    "think": Mixture(AnswerFormat(None, "think"), THINK),
}

"""Trial texts, on which two ways to encode are compared before the quicker one is used.

A proof or a package may be wrong about one tokenizer of many. So its own special tokens, their halves and texts that
are known to be hard are encoded in both ways when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from actors.text.conversations import WITH_TOOL, ConversationTemplate
from protocol.errors import BadRequest
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Role, Turn
from protocol.messages.tools import ToolCall

HARD = (
    "",
    " ",
    "   leading and trailing   ",
    "\r\n\r\n\tindented\r\n    code()  \n\n\n",
    "e\u0301 a\u030a o\u0308 \u1100\u1161\u11a8 \ufb01 \u212b \u2126 \u00bd \uff21\uff22",
    "日本語の文章、中文文本。한국어 텍스트",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽",
    "שלום عليكم हिन्दी ไทย",
    "\x00\x01\x7f\u200b\ufeff\u2028\u00a0\u3000",
    "it's they'll WE'RE 'tis don\u2019t",
    "1234567890 3.14159 1,000,000 0x7f 10^-9",
    "http://example.com/a?b=c&d=%20#e <a href='x'>&amp;</a>",
    "supercalifragilisticexpialidocious" * 8,
    "a" * 300,
    " " * 130 + "x",
    "▁▁ ▁a Ġ Ċ ## [UNK] <unk> <0x0A>",
    '{"key": ["value", null, -1.5e3], "nested": {"a": "\\n\\u00e9"}}',
    "def f(x):\n    return [y ** 2 for y in x if y % 2]\n",
)
FILLER = "The quick brown fox jumps over the lazy dog, and then does so again. " * 4
CALL = ToolCall("call_1", "example", "{}")


def cut_texts(boundary: str) -> Iterator[str]:
    """Yield hard texts on either side of a boundary, far enough from the one before it to be cut there."""
    for before, after in zip(HARD, reversed(HARD), strict=True):
        yield "".join([f"{FILLER}{before}{boundary}{after}" for _ in range(2)])


def hard_texts(tokens: Collection[str]) -> Iterator[str]:
    """Yield hard texts, alone and around each of some special tokens, whole and cut in half."""
    yield from HARD
    for token in tokens:
        half = len(token) // 2
        for before, after in zip(HARD, reversed(HARD), strict=True):
            yield f"{before}{token}{after}{token[:half]}{after}{token[half:]} {token} {token}{token}"


def trial_conversations(template: ConversationTemplate) -> list[str]:
    """Return conversations of a few turns as a template renders them, with calls of tools where it takes them."""
    rendered = list[str]()
    for turns, rendering in _conversations(template.usual):
        try:
            rendered.append(template.render(turns, rendering))
        except BadRequest:
            continue  # templates refuse roles, orders of roles, and calls
    return rendered


def _conversations(usual: Rendering) -> Iterator[tuple[list[Turn], Rendering]]:
    system, user, assistant = Turn(Role.SYSTEM, FILLER), Turn(Role.USER, FILLER), Turn(Role.ASSISTANT, FILLER)
    yield [user, assistant, user, assistant, user], usual
    yield [system, user, assistant, user, assistant, user], usual
    called = [Turn(Role.ASSISTANT, "", calls=(CALL,)), Turn(Role.TOOL, FILLER, call_id=CALL.id)]
    yield [user, *called, *called, *called, assistant, user], WITH_TOOL if usual is DEFAULT_RENDERING else usual

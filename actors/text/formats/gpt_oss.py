"""Answers as gpt-oss models write them (Harmony): messages, each of which goes to a channel and may have a recipient.

    <|channel|>analysis<|message|>The user ...<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}

(without the line break). The prompt ends with `<|start|>assistant`, so an answer begins within the header of a message.
A header may name the recipient in the role (`<|start|>assistant to=functions.f<|channel|>commentary`) or behind the
channel, and leave out `<|constrain|>` or the blank before it. The channel `analysis` is reasoning; others (`final`,
and `commentary` without a recipient) are the answer. A message to an offered function is a call, in whatever channel.
A message to a tool of the model's own (`python`, `browser.search`) is left out, since no such tool is here.

A call is its JSON object: `<|call|>` ends a generation, and so is seldom there. Other messages end at `<|end|>`, also
where a message only mentions it.
"""

from __future__ import annotations

from attrs import frozen

from actors.text.formats.answer import Expected
from actors.text.formats.call_tags import TagPart, optional, regex, sequence, tag, text, text_until
from actors.text.formats.held_format import CallFrame, HeldArguments
from actors.text.formats.json_calls import json_object
from actors.text.formats.json_text import SPACE
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.stage import ReasoningPiece, TextPiece

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ROLE, TO, ANALYSIS = "assistant", "to=", "analysis"
FUNCTIONS = "functions."
HEADER_CHARACTERS_MAX = 512  # names of functions have 64 at most


@frozen
class MessageHeader:
    """The channel and the recipient in the header of a message."""

    channel: str
    recipient: str  # empty for the user

    @classmethod
    def of(cls, text: str) -> MessageHeader:
        """Return the header with this text, which may name several channels: the last one counts."""
        head, _, channel = text.rpartition(CHANNEL)
        words = f"{head} {channel}".replace(CONSTRAIN, " ").replace(CHANNEL, " ").replace(START, " ").split()
        recipients = [word.removeprefix(TO) for word in words if word.startswith(TO)]
        names = channel.replace(CONSTRAIN, " ").split()
        recipient = recipients[-1] if recipients else ""
        return cls(names[0] if names else "", "" if recipient in {ROLE, "user"} else recipient)


@frozen
class GptOss:
    """Messages."""

    markers: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    thought_begins: tuple[str, ...] = (f"{CHANNEL}{ANALYSIS}{MESSAGE}",)
    thought_ends: tuple[str, ...] = (END,)

    @property
    def frame(self) -> CallFrame:
        """The text around a call: the model ends an answer behind one, by a token that is no text."""
        lead = sequence(optional(_thought(f"{CHANNEL}{ANALYSIS}{MESSAGE}")), f"{CHANNEL}commentary ")
        return CallFrame(f"{TO}{FUNCTIONS}", lead=lead, alone=True)

    @property
    def thought_rest(self) -> TagPart:
        """The grammar of the rest of a message of reasoning, with the beginning of the next message."""
        return _thought("")

    def answer(self, content: TagPart, *, begun: bool) -> TagPart:
        """Return the grammar of a final message, perhaps behind one of reasoning."""
        if begun:
            return content
        thought = _thought(f"{CHANNEL}{ANALYSIS}{MESSAGE}")
        header = sequence(f"{CHANNEL}final", optional(regex(r" ?<\|constrain\|>json")), MESSAGE)
        return sequence(optional(text(f"{START}{ROLE}")), optional(thought), header, content)

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of the rest of a call, from its recipient on."""
        kind = regex(r"(<\|channel\|>commentary)?( | ?<\|constrain\|>)json")
        return tag(f"{TO}{FUNCTIONS}{name}", sequence(kind, MESSAGE, arguments.json), "")

    def read_whole(self, source: Source, offer: Expected) -> Reading[None]:
        """Read the messages."""
        ended = True  # the last message, so that a header may come without its beginning
        if offer.thinking:
            ended = yield from self._body(source, MessageHeader(ANALYSIS, ""))
        while (yield from source.peek()):
            begin = (START, f" {TO}", TO, CHANNEL) if ended else (START,)
            if (yield from source.starts_with(*begin)) is None:
                # Text outside of messages is the answer, and so is what remains of a header that is none.
                marker = yield from source.pass_until(TextPiece, START)
                if marker is None:
                    return
                source.begin(marker)
            try:
                ended = yield from self._message(source, offer)
            except NoCall:
                source.fail()
                ended = False

    def _message(self, source: Source, offer: Expected) -> Reading[bool]:
        """Read a message; return whether it has ended."""
        header = MessageHeader.of((yield from self._header(source)))
        if not header.recipient:
            source.forget()
            return (yield from self._body(source, header))
        name = header.recipient.removeprefix(FUNCTIONS)
        if name in offer.tools:
            source.call(name, (yield from json_object(source)))
            return (yield from source.close(SPACE, CALL, END, RETURN)) is not None
        if header.recipient.startswith(FUNCTIONS):
            raise NoCall
        _, end = yield from source.until(END, CALL, RETURN)
        source.forget()
        return end is not None

    def _header(self, source: Source) -> Reading[str]:
        """Take a header with the marker at its end, and return it without that."""
        yield from source.accept(START)
        yield from source.accept(ROLE)
        parts, left = list[str](), HEADER_CHARACTERS_MAX
        while left > 0:
            words = yield from source.run_without("<", left)
            marker = yield from source.expect(CHANNEL, CONSTRAIN, MESSAGE)
            if marker == MESSAGE:
                return f"{''.join(parts)}{words}"
            parts += words, marker
            left -= len(words) + len(marker)
        raise NoCall

    def _body(self, source: Source, header: MessageHeader) -> Reading[bool]:
        """Pass on the body of a message without a recipient; return whether it has ended."""
        if header.channel == ANALYSIS:
            end = yield from source.pass_until(ReasoningPiece, END, f"{START}{ROLE}")
        else:
            end = yield from source.pass_until(TextPiece, END, RETURN, f"{START}{ROLE}")
        return end is not None


def _thought(begin: str) -> TagPart:
    """Return the grammar of a message of reasoning, and of the beginning of the next message."""
    return sequence(text_until(END, begin, (f"{START}{ROLE}",)), f"{START}{ROLE}")

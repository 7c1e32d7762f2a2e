"""The items of an answer: messages, reasoning and calls, each with the events of its beginning and its end.

An item keeps its text as the inside of a JSON string: its last events and the whole response repeat the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

import msgspec
from attrs import define, field, frozen

from protocol.dialects.responses.tools import joined
from protocol.dialects.tools import call_id
from protocol.messages.text import AnswerPiece, CallPart, Reasoning
from protocol.messages.tools import ToolCall, read_arguments

EventFields: TypeAlias = tuple[str, dict[str, object]]
"""The type of an event, and its fields besides those of all events."""

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode


@define(eq=False)
class OutputItem(ABC):
    """One item of an answer."""

    prefix: ClassVar[str]  # of its id
    delta_type: ClassVar[str]  # of the event of its next text

    request_id: str
    index: int  # among the items of its answer
    text: bytearray = field(factory=bytearray)  # the inside of a JSON string
    ids: Mapping[str, object] = field(factory=dict)  # the token ids in an answer that is not streamed, if requested

    @property
    def id(self) -> str:
        """Its id, which no other item has."""
        return f"{self.prefix}_{self.request_id}{f'_{self.index}' if self.index else ''}"

    @property
    def place(self) -> dict[str, object]:
        """The fields of an event that name the item and its only part."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def whole(self) -> msgspec.Raw:
        """The JSON string of its text."""
        return msgspec.Raw(b'"' + self.text + b'"')

    def shown(self, status: str) -> dict[str, object]:
        """Return the item with its text."""
        return self._object(status, self.whole)

    def around(self, status: str) -> tuple[bytes, bytes]:
        """Return the JSON of the item before and after the inside of its text."""
        before, _, after = _encode(self._object(status, _GAP)).partition(_GAP_JSON)
        return before + b'"', b'"' + after

    def status(self, ended: str) -> str:
        """Return the status of an item that was the last one when its answer ended in a status."""
        return ended

    @abstractmethod
    def begins(self) -> Iterator[EventFields]:
        """Yield the events before its text."""

    @abstractmethod
    def ends(self, status: str) -> Iterator[EventFields]:
        """Yield the events behind its text."""

    @abstractmethod
    def _object(self, status: str, text: msgspec.Raw | None) -> dict[str, object]:
        """Return the item around the JSON of its text, or without it."""


# No text has it: a byte 0 is escaped in JSON.
_GAP_JSON = b'"\\u0000\\u0000"'
_GAP = msgspec.Raw(_GAP_JSON)


@define(eq=False)
class _PartItem(OutputItem):
    """An item whose text is a part of its content."""

    def begins(self) -> Iterator[EventFields]:
        """Yield the events of the item and of its part."""
        yield "response.output_item.added", {"output_index": self.index, "item": self._object("in_progress", None)}
        yield "response.content_part.added", {**self.place, "part": self._part(msgspec.Raw(b'""'))}

    def ends(self, status: str) -> Iterator[EventFields]:
        """Yield the events of its text, of its part and of the item."""
        yield self.delta_type.replace(".delta", ".done"), {**self.place, "text": self.whole, **self._extra()}
        yield "response.content_part.done", {**self.place, "part": self._part(self.whole)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.shown(status)}

    def _extra(self) -> Mapping[str, object]:
        return {}

    @abstractmethod
    def _part(self, text: msgspec.Raw) -> dict[str, object]:
        """Return the part around the JSON of its text."""


@define(eq=False)
class MessageItem(_PartItem):
    """A message of the assistant."""

    prefix = "msg"
    delta_type = "response.output_text.delta"

    logprobs: Sequence[bytes] = ()  # the insides of JSON lists, which its end repeats
    more: Mapping[str, object] = field(factory=dict)  # of its part, in an answer that is not streamed

    def _extra(self) -> Mapping[str, object]:
        return {"logprobs": msgspec.Raw(b"[" + b",".join(self.logprobs) + b"]")}

    def _object(self, status: str, text: msgspec.Raw | None) -> dict[str, object]:
        content = [] if text is None else [self._part(text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: msgspec.Raw) -> dict[str, object]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [], **self.more}


@define(eq=False)
class ReasoningItem(_PartItem):
    """The reasoning of the model, which is no part of its answer."""

    prefix = "rs"
    delta_type = "response.reasoning_text.delta"

    def _object(self, status: str, text: msgspec.Raw | None) -> dict[str, object]:
        content = [] if text is None else [self._part(text)]
        kept = {"summary": [], "content": content, "encrypted_content": None}
        return {"id": self.id, "type": "reasoning", "status": status, **kept}

    def _part(self, text: msgspec.Raw) -> dict[str, object]:
        return {"type": "reasoning_text", "text": text, **self.ids}


@define(eq=False)
class CallItem(OutputItem):
    """A call of a function; its text is the arguments."""

    prefix = "fc"
    delta_type = "response.function_call_arguments.delta"

    call: int = 0  # among the calls of its answer
    namespace: str | None = None
    name: str = ""

    @property
    def call_id(self) -> str:
        """The id by which the client names the call when it returns the result."""
        return call_id(self.request_id, 0, self.call)

    @property
    def place(self) -> dict[str, object]:
        """The fields of an event that name the item."""
        return {"item_id": self.id, "output_index": self.index}

    def begins(self) -> Iterator[EventFields]:
        """Yield the event of the item without arguments."""
        yield "response.output_item.added", {"output_index": self.index, "item": self._object("in_progress", None)}

    def ends(self, status: str) -> Iterator[EventFields]:
        """Yield the events of its arguments and of the item."""
        yield f"{self.delta_type[:-6]}.done", {**self.place, "arguments": self.whole, "name": self.name}
        yield "response.output_item.done", {"output_index": self.index, "item": self.shown(status)}

    def status(self, ended: str) -> str:
        """Return whether the arguments are whole, as they are in an answer that was cut behind them."""
        return ended if self.made is None else "completed"

    @property
    def made(self) -> ToolCall | None:
        """The call for a later request, None while its arguments are not whole."""
        arguments = _decode_text(self.whole)
        try:
            read_arguments(arguments)
        except (ValueError, RecursionError):
            return None
        return ToolCall(self.call_id, joined(self.namespace, self.name), arguments)

    def _object(self, status: str, text: msgspec.Raw | None) -> dict[str, object]:
        arguments = msgspec.Raw(b'""') if text is None else text
        fields = {"call_id": self.call_id, "name": self.name, "arguments": arguments}
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"id": self.id, "type": "function_call", "status": status, **fields, **namespace, **self.ids}


@frozen
class GivenAnswer:
    """An answer as a later request continues it."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]


@define(eq=False)
class Output:
    """The items of one answer as they come, each behind the other; the last of them is open."""

    request_id: str
    places: Mapping[str, tuple[str | None, str]]  # the namespace and the name of each function by its name for models
    items: list[OutputItem] = field(factory=list)

    @property
    def last(self) -> OutputItem | None:
        """The open item."""
        return self.items[-1] if self.items else None

    def item_for(self, piece: AnswerPiece) -> OutputItem:
        """Return the item that has the next piece: the last one, or a new one, which is then the last."""
        last = self.last
        match piece:
            case CallPart(index, name):
                if isinstance(last, CallItem) and last.call == index:
                    return last
                namespace, short = self.places.get(name, (None, name))
                item: OutputItem = CallItem(
                    self.request_id, len(self.items), call=index, namespace=namespace, name=short
                )
            case Reasoning():
                if isinstance(last, ReasoningItem):
                    return last
                item = ReasoningItem(self.request_id, len(self.items))
            case _:
                # Tokens without text belong to the item that they end.
                if isinstance(last, MessageItem) or (last is not None and not piece.text):
                    return last
                item = MessageItem(self.request_id, len(self.items))
        self.items.append(item)
        return item

    def given(self) -> GivenAnswer:
        """Return the answer for a later request; calls that are not whole are left out."""
        texts = {
            kind: "".join([_decode_text(each.whole) for each in self.items if isinstance(each, kind)])
            for kind in (MessageItem, ReasoningItem)
        }
        calls = tuple(call for each in self.items if isinstance(each, CallItem) and (call := each.made) is not None)
        return GivenAnswer(texts[MessageItem], texts[ReasoningItem], calls)


def piece_text(piece: AnswerPiece) -> str:
    """Return the text that a piece adds to its item."""
    return piece.arguments if isinstance(piece, CallPart) else piece.text

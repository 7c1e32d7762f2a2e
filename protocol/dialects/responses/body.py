"""The body of a response that is not streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from protocol.dialects.answer_builder import AnswerBody, AnswerBuilder, ChoiceParts, extend
from protocol.dialects.logprobs import logprob_entries
from protocol.dialects.responses.objects import response_id, response_object
from protocol.dialects.responses.output import MessageItem, Output, piece_text
from protocol.dialects.responses.tools import places
from protocol.messages.generation import FinishReason, Started
from protocol.messages.text import Accepted, Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text

if TYPE_CHECKING:
    from protocol.dialects.responses.requests import CreateHttp

_encode = msgspec.json.Encoder().encode


class Completion(AnswerBuilder):
    """The body that answers a request without a stream."""

    def __init__(self, create: CreateHttp, *, request_id: str, created_at: int) -> None:
        super().__init__(1, ids=bool(create.return_token_ids), logprobs=create.logprobs is not None)
        self._create, self._request_id, self._created_at = create, request_id, created_at
        self._output = Output(request_id, places(create.tools or ()))
        self._more: dict[int, ChoiceParts] = {}  # the log probabilities and ids of each item, by its index

    def add(self, reply: Accepted | Started | AnswerPiece | ChoiceEnded) -> None:
        """Add the next reply of any kind."""
        if isinstance(reply, Text | Reasoning | CallPart):
            item = self._output.item_for(reply)
            item.text += _encode(piece_text(reply))[1:-1]
            if reply.ids or reply.logprobs:
                self._add_more(self._more.setdefault(item.index, ChoiceParts()), reply)
        else:
            super().add(reply)

    def add_logprobs(self, choice: ChoiceParts, text: AnswerPiece) -> None:
        """Add the log probabilities of the next piece of a message."""
        extend(choice.logprobs, logprob_entries(text.logprobs))

    def finish(self, answered: Answered) -> AnswerBody:
        """Return the body of the whole answer."""
        [choice] = self.whole()
        assert choice.ended is not None
        incomplete = choice.ended.reason is FinishReason.LENGTH
        status = "incomplete" if incomplete else "completed"
        name = response_id(self._request_id)
        versions = choice.ended.weight_versions
        response = response_object(self._create, name, self._created_at, status, (), answered.usage, versions)
        if incomplete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if not self._output.items:
            self._output.item_for(Text("", 0))
        before, after = _around(response, "output")
        return AnswerBody.from_parts([before, b"[", *self._items(status), b"]", after])

    def _items(self, status: str) -> Iterator[bytes | bytearray]:
        """Yield the parts of the JSON of all items."""
        *_, last = self._output.items
        for item in self._output.items:
            if isinstance(item, MessageItem):
                item.more = self._more_of(item.index)
            else:
                item.ids = self._ids_of(item.index)
            before, after = item.around(item.status(status) if item is last else "completed")
            yield from (b"," * bool(item.index) + before, item.text, after)

    def _add_more(self, parts: ChoiceParts, text: AnswerPiece) -> None:
        if self._ids:
            extend(parts.ids, text.ids)
        if self._logprobs:
            self.add_logprobs(parts, text)

    def _more_of(self, index: int) -> dict[str, object]:
        parts = self._more.get(index, ChoiceParts())
        return {"logprobs": msgspec.Raw(b"[" + parts.logprobs + b"]"), **self._ids_of(index)}

    def _ids_of(self, index: int) -> dict[str, object]:
        parts = self._more.get(index, ChoiceParts())
        return {"token_ids": msgspec.Raw(b"[" + parts.ids + b"]")} if self._ids else {}


def _around(fields: dict[str, object], name: str) -> tuple[bytes, bytes]:
    """Return the JSON of an object before and after the value of one field."""
    index = list(fields).index(name)
    before, after = dict(list(fields.items())[:index]), dict(list(fields.items())[index + 1 :])
    return b'%b%b"%b":' % (_encode(before)[:-1], b"," if before else b"", name.encode()), (
        b"," * bool(after) + _encode(after)[1:]
    )

"""The body of a response that is not streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocol.dialects.answer_builder import AnswerBody, AnswerBuilder, ChoiceParts, extend
from protocol.dialects.logprobs import logprob_entries
from protocol.dialects.responses.objects import item_id, item_object, response_id, response_object
from protocol.messages.generation import FinishReason
from protocol.messages.text import Answered, AnswerPiece

if TYPE_CHECKING:
    from protocol.dialects.responses.requests import CreateHttp

_encode = msgspec.json.Encoder().encode


class Completion(AnswerBuilder):
    """The body that answers a request without a stream."""

    def __init__(self, create: CreateHttp, *, request_id: str, created_at: int) -> None:
        super().__init__(1, ids=bool(create.return_token_ids), logprobs=create.logprobs is not None)
        self._create, self._request_id, self._created_at = create, request_id, created_at

    def add_logprobs(self, choice: ChoiceParts, text: AnswerPiece) -> None:
        """Add the log probabilities of the next piece of a choice."""
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
        before, after = _around(response, "output")
        item_before, item_after = _around(item_object(item_id(self._request_id), status, ()), "content")
        parts: list[bytes | bytearray] = [before, b"[", item_before]
        parts += [b'[{"type":"output_text","text":"', choice.text]
        parts += [b'","annotations":[],"logprobs":[', choice.logprobs]
        if self._ids:
            parts += [b'],"token_ids":[', choice.ids]
        return AnswerBody.from_parts([*parts, b"]}]", item_after, b"]", after])


def _around(fields: dict[str, object], name: str) -> tuple[bytes, bytes]:
    """Return the JSON of an object before and after the value of one field."""
    index = list(fields).index(name)
    before, after = dict(list(fields.items())[:index]), dict(list(fields.items())[index + 1 :])
    return b'%b%b"%b":' % (_encode(before)[:-1], b"," if before else b"", name.encode()), (
        b"," * bool(after) + _encode(after)[1:]
    )

"""The events of one streamed response, as the bytes that are sent.

The events `response.output_text.delta`, one for each piece of text, are put together from bytes that are encoded once,
because this runs for every token; all others are encoded as a whole. The last events repeat the whole text, which is
therefore kept as encoded JSON while it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocol.dialects.http import error_object, error_type
from protocol.dialects.logprobs import logprob_entries, split_text
from protocol.dialects.responses.objects import item_id, item_object, part_object, response_id, response_object
from protocol.errors import InternalError, RequestError
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import AnswerPiece, ChoiceEnded, Text
from protocol.weight_versions import WeightVersions

if TYPE_CHECKING:
    from protocol.dialects.responses.objects import AnyCreate

# Stock clients accept messages of at most 1 MiB.
LOGPROBS_REPEATED_MAX = 64 * 1024  # bytes of JSON; longer ones are not repeated at the end
LOGPROBS_A_DELTA_MAX = 64  # each can have kilobytes, with the likeliest tokens

FINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The types of the events that end a response."""

_encode = msgspec.json.Encoder().encode


def error_event(error: RequestError, stream_id: str | None = None) -> bytes:
    """Return the event of a request that failed before its response began; the connection stays open."""
    event: dict[str, object] = {"type": "error", "status": error.http_status}
    if stream_id is not None:
        event["stream_id"] = stream_id
    event["error"] = error_object(error)
    if error.retry_after_s is not None:
        event["headers"] = {"retry-after": str(error.retry_after_s)}
    return _encode(event)


class Events:
    """Builds the events of one response in their order: begin, open, delta..., and one of the three ends.

    Each is the text of a WebSocket message or, with `sse`, a whole server-sent event.
    """

    def __init__(self, create: AnyCreate, *, request_id: str, created_at: int, sse: bool = False) -> None:
        self.id = response_id(request_id)
        self._item_id = item_id(request_id)
        self._stream = {} if create.stream_id is None else {"stream_id": create.stream_id}
        self._create = create
        self._created_at = created_at
        self._sse = sse
        self._sequence = 0
        self._pieces: list[str] = []
        self._encoded = bytearray()  # the inside of the JSON string of the whole text, which the last events repeat
        self.opened = False  # whether the events before the first text have been made
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._logprobs: list[bytes] | None = None if create.logprobs is None else []  # None if they are not repeated
        self._logprobs_bytes = 0
        self._plain = create.logprobs is None and not create.return_token_ids
        head = {"type": "response.output_text.delta", **self._place, **({"logprobs": []} if self._plain else {})}
        before, self._delta_tail = (b"event: response.output_text.delta\ndata: ", b"}\n\n") if sse else (b"", b"}")
        self._delta_head = before + _encode(head | self._stream)[:-1] + b',"sequence_number":'

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def begin(self) -> tuple[bytes, ...]:
        """Return the events of a request that was accepted."""
        response = msgspec.Raw(_encode(self._response("in_progress")))
        return (
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        )

    def open(self) -> tuple[bytes, ...]:
        """Return the events before the first text; a warm-up has neither."""
        assert not self.opened
        if self._create.warm_up:
            return ()
        self.opened = True
        return (
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", whole=False)),
            self._event("response.content_part.added", **self._place, part=part_object("")),
        )

    def deltas(self, reply: AnswerPiece) -> tuple[bytes, ...]:
        """Return the events of the next piece of text: several if it has many log probabilities, or is the first.

        The events of `open` come before the first piece, unless they have been sent.
        """
        if not isinstance(reply, Text):
            raise InternalError(f"the answer has a part that Responses cannot send yet: {type(reply).__name__}")
        short = len(reply.logprobs) <= LOGPROBS_A_DELTA_MAX or self._create.logprobs is None
        if self.opened and short:
            return (self.delta(reply),)
        opening = () if self.opened else self.open()
        return (*opening, *map(self.delta, (reply,) if short else split_text(reply, LOGPROBS_A_DELTA_MAX)))

    def delta(self, reply: Text) -> bytes:
        """Return the one event of the next piece of text, however long it is."""
        number = self._sequence
        self._sequence = number + 1
        text = _encode(reply.text)
        self._pieces.append(reply.text)
        self._encoded += text[1:-1]
        if self._plain:
            return b'%b%d,"delta":%b%b' % (self._delta_head, number, text, self._delta_tail)
        logprobs = _encode(logprob_entries(reply.logprobs) if self._create.logprobs is not None else [])
        self._remember(logprobs[1:-1])
        ids = b',"token_ids":' + _encode(reply.ids) if self._create.return_token_ids else b""
        return b'%b%d,"delta":%b,"logprobs":%b%b%b' % (self._delta_head, number, text, logprobs, ids, self._delta_tail)

    def finish(self, ended: ChoiceEnded, usage: Usage) -> tuple[bytes, ...]:
        """Return the events of a response that ended by itself, or at its limit of tokens."""
        if self._create.warm_up:
            return (self._event("response.completed", response=self._response("completed", usage=usage)),)
        opening = () if self.opened else self.open()
        versions = ended.weight_versions
        if ended.reason is FinishReason.LENGTH:
            return (*opening, *self._incomplete("max_output_tokens", usage, versions))
        response = self._response("completed", usage=usage, item="completed", versions=versions)
        return (*opening, *self._close("completed"), self._event("response.completed", response=response))

    def cancelled(self, usage: Usage | None = None) -> tuple[bytes, ...]:
        """Return the events of a response that its client has cancelled by `response.cancel`."""
        return self._incomplete("cancelled", usage)

    def failed(self, error: RequestError, usage: Usage | None = None) -> bytes:
        """Return the event of a response that failed after it had begun; its text so far is marked incomplete."""
        code = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}
        details = {
            # OpenAI's set of codes is closed here, so `cause` has our own
            "code": code.get(error_type(error), "server_error"),
            "message": error.detail,
            "param": error.param,
            "type": error_type(error),
            "cause": error.code,
        }
        response = self._response("failed", usage=usage, item="incomplete" if self.opened else None)
        return self._event("response.failed", response=response | {"error": details})

    def _incomplete(self, reason: str, usage: Usage | None, versions: WeightVersions = ()) -> tuple[bytes, ...]:
        closing = self._close("incomplete") if self.opened else ()
        item = "incomplete" if self.opened else None
        response = self._response("incomplete", usage=usage, item=item, versions=versions)
        response["incomplete_details"] = {"reason": reason}
        return (*closing, self._event("response.incomplete", response=response))

    def _close(self, status: str) -> tuple[bytes, ...]:
        text = self._whole_text()
        logprobs = msgspec.Raw(b"[" + b",".join(self._logprobs or ()) + b"]")
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=part_object(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(status)),
        )

    def _whole_text(self) -> msgspec.Raw:
        return msgspec.Raw(b'"' + self._encoded + b'"')

    def _remember(self, logprobs: bytes) -> None:
        """Keep the log probabilities of a delta for the end of the text, unless they become too long for one event."""
        if self._logprobs is None or not logprobs:
            return
        self._logprobs_bytes += len(logprobs)
        if self._logprobs_bytes > LOGPROBS_REPEATED_MAX:
            self._logprobs = None
        else:
            self._logprobs.append(logprobs)

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        payload = _encode({"type": kind, "sequence_number": number, **self._stream, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload) if self._sse else payload

    def _item(self, status: str, *, whole: bool = True) -> dict[str, object]:
        return item_object(self._item_id, status, [part_object(self._whole_text())] if whole else [])

    def _response(
        self, status: str, *, usage: Usage | None = None, item: str | None = None, versions: WeightVersions = ()
    ) -> dict[str, object]:
        output = [] if item is None else [self._item(item)]
        return response_object(self._create, self.id, self._created_at, status, output, usage, versions)

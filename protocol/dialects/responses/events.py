"""The events of one streamed response, as the bytes that are sent.

The events `response.output_text.delta`, one for each piece of text, are put together from bytes that are encoded once,
because this runs for every token; all others are encoded as a whole. The last events repeat the whole text, which is
therefore kept as encoded JSON while it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from protocol.dialects.http import error_object, error_type
from protocol.dialects.logprobs import logprob_entries, split_text
from protocol.dialects.responses.objects import response_id, response_object
from protocol.dialects.responses.output import GivenAnswer, MessageItem, Output, OutputItem
from protocol.dialects.responses.tools import places
from protocol.errors import RequestError
from protocol.messages.generation import FinishReason, Usage
from protocol.messages.text import AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text
from protocol.weight_versions import WeightVersions

if TYPE_CHECKING:
    from protocol.dialects.responses.objects import AnyCreate

# The events that end an item repeat its text three times. Those of a longer text come with the last events, for which a
# client may be waited for: no client reads megabytes in the turn in which the next item begins.
REPEATED_AT_ONCE_MAX = 64 * 1024  # bytes of JSON
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
    """Builds the events of one response in their order: begin, deltas..., and one of the three ends.

    Each is the text of a WebSocket message or, with `sse`, a whole server-sent event. An item begins with its first
    piece, so a piece may bring the events that end the item before it; those of a long item come with the last events.
    """

    def __init__(self, create: AnyCreate, *, request_id: str, created_at: int, sse: bool = False) -> None:
        self.id = response_id(request_id)
        self._stream = {} if create.stream_id is None else {"stream_id": create.stream_id}
        self._create = create
        self._created_at = created_at
        self._sse = sse
        self._sequence = 0
        self._output = Output(request_id, places(create.tools or ()))
        self._done: list[msgspec.Raw] = []  # the JSON of the items that have ended
        self._unended: list[OutputItem] = []  # items with all of their text, whose last events come at the end
        self._encoded = bytearray()  # the text of the open item
        self.opened = False  # whether the open item is a message, so that `delta` may be called with more of its text
        self._logprobs: list[bytes] | None = None if create.logprobs is None else []  # None if they are not repeated
        self._logprobs_bytes = 0
        self._plain = create.logprobs is None and not create.return_token_ids
        self._delta_tail = b"}\n\n" if sse else b"}"
        self._delta_head = b""  # of the open item

    @property
    def given(self) -> GivenAnswer:
        """The answer so far, for a later request."""
        return self._output.given()

    def begin(self) -> tuple[bytes, ...]:
        """Return the events of a request that was accepted."""
        response = msgspec.Raw(_encode(self._response("in_progress")))
        return (
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        )

    def open(self) -> tuple[bytes, ...]:
        """Return the events that begin a message before its first text."""
        return self._turn_to(Text("", 0))

    def deltas(self, reply: AnswerPiece) -> tuple[bytes, ...]:
        """Return the events of the next piece: several if it has many log probabilities, or begins an item."""
        if not isinstance(reply, Text):
            return self._other_delta(reply)
        short = len(reply.logprobs) <= LOGPROBS_A_DELTA_MAX or self._create.logprobs is None
        if self.opened and short:
            return (self.delta(reply),)
        opening = self._turn_to(reply)
        if not self.opened:
            return self._ids_delta(reply)
        return (*opening, *map(self.delta, (reply,) if short else split_text(reply, LOGPROBS_A_DELTA_MAX)))

    def delta(self, reply: Text) -> bytes:
        """Return the one event of the next piece of text of the open message, however long it is."""
        number = self._sequence
        self._sequence = number + 1
        text = _encode(reply.text)
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
        # An answer of nothing at all is an empty message.
        opening = () if self._output.items else self.open()
        versions = ended.weight_versions
        if ended.reason is FinishReason.LENGTH:
            return (*opening, *self._incomplete("max_output_tokens", usage, versions))
        closing = (*self._end_others(), *self._close("completed"))
        response = self._response("completed", usage=usage, versions=versions)
        return (*opening, *closing, self._event("response.completed", response=response))

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
        last = self._output.last
        unfinished = [] if last is None else [last.shown(last.status("incomplete"))]
        response = self._response("failed", usage=usage, unfinished=unfinished)
        return self._event("response.failed", response=response | {"error": details})

    def _incomplete(self, reason: str, usage: Usage | None, versions: WeightVersions = ()) -> tuple[bytes, ...]:
        last = self._output.last
        closing = () if last is None else (*self._end_others(), *self._close(last.status("incomplete")))
        response = self._response("incomplete", usage=usage, versions=versions)
        response["incomplete_details"] = {"reason": reason}
        return (*closing, self._event("response.incomplete", response=response))

    def _turn_to(self, piece: AnswerPiece) -> tuple[bytes, ...]:
        """Return the events before the piece: none if it belongs to the open item."""
        last = self._output.last
        item = self._output.item_for(piece)
        if item is last:
            return ()
        closing = () if last is None else self._close("completed", last, inner=True)
        self._encoded, self.opened = item.text, isinstance(item, MessageItem)
        head = {"type": item.delta_type, **item.place, **({"logprobs": []} if self.opened and self._plain else {})}
        before = b"event: %b\ndata: " % item.delta_type.encode() if self._sse else b""
        self._delta_head = before + _encode(head | self._stream)[:-1] + b',"sequence_number":'
        return (*closing, *(self._event(kind, **fields) for kind, fields in item.begins()))

    def _other_delta(self, reply: Reasoning | CallPart) -> tuple[bytes, ...]:
        """Return the events of the next piece of reasoning, or of a call."""
        opening = self._turn_to(reply)
        text = reply.arguments if isinstance(reply, CallPart) else reply.text
        if not text and not (reply.ids and self._create.return_token_ids):
            return opening
        return (*opening, self._bare_delta(text, reply.ids))

    def _ids_delta(self, reply: Text) -> tuple[bytes, ...]:
        """Return the event of tokens without text behind an item that is no message."""
        return (self._bare_delta("", reply.ids),) if reply.ids and self._create.return_token_ids else ()

    def _bare_delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        encoded = _encode(text)
        self._encoded += encoded[1:-1]
        ids = b',"token_ids":' + _encode(token_ids) if self._create.return_token_ids else b""
        return b'%b%d,"delta":%b%b%b' % (self._delta_head, number, encoded, ids, self._delta_tail)

    def _close(self, status: str, item: OutputItem | None = None, *, inner: bool = False) -> tuple[bytes, ...]:
        """Return the events that end an item, by default the open one; none yet for a long one with an item behind."""
        item = item or self._output.last
        assert item is not None
        if isinstance(item, MessageItem):
            item.logprobs, self._logprobs = self._logprobs or (), None if self._logprobs is None else []
        self._done.append(msgspec.Raw(_encode(item.shown(status))))
        if inner and len(item.text) > REPEATED_AT_ONCE_MAX:
            self._unended.append(item)
            return ()
        return self._ends(item, status)

    def _end_others(self) -> tuple[bytes, ...]:
        """Return the events that end the items before the open one, as far as they have not been sent."""
        unended, self._unended = self._unended, []
        return tuple(event for item in unended for event in self._ends(item, "completed"))

    def _ends(self, item: OutputItem, status: str) -> tuple[bytes, ...]:
        return tuple(self._event(kind, **fields) for kind, fields in item.ends(status))

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

    def _response(
        self,
        status: str,
        *,
        usage: Usage | None = None,
        unfinished: Sequence[object] = (),
        versions: WeightVersions = (),
    ) -> dict[str, object]:
        output = [*self._done, *unfinished]
        return response_object(self._create, self.id, self._created_at, status, output, usage, versions)

"""OpenAI Responses: the events of one answer as ready bytes, and an answer in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from protocol.dialects.answer_builder import AnswerBody, AnswerBuilder, Choice, extend
from protocol.dialects.http import error_object, error_type
from protocol.dialects.logprobs import logprob_entries, split_text
from protocol.errors import RequestError
from protocol.messages import FinishReason, Usage
from protocol.text_messages import Answered, ChoiceEnded, Text

if TYPE_CHECKING:  # what is asked is read elsewhere, and only looked at here
    from protocol.dialects.formats import TextFormat
    from protocol.dialects.responses.requests import Create, CreateHttp

    AnyCreate: TypeAlias = Create | CreateHttp

# Stock clients take frames of 1 MiB at most, so what is long is not said back, or not twice.
INSTRUCTIONS_ECHOED_MAX = 1024
FORMAT_ECHOED_MAX = 16 * 1024
LOGPROBS_REPEATED_MAX = 64 * 1024  # bytes of JSON
LOGPROBS_A_DELTA_MAX = 64  # with the likeliest tokens each can have kilobytes

FINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The types of the events after which nothing follows of the same response."""

_encode = msgspec.json.Encoder().encode


def response_id(request_id: str) -> str:
    """Return how clients know the response to a request."""
    return f"resp_{request_id}"


def error_event(error: RequestError, stream_id: str | None = None) -> bytes:
    """Return the event that says that a request failed before its response began; the socket stays open."""
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
        self._item_id = _item_id(request_id)
        self._stream = {} if create.stream_id is None else {"stream_id": create.stream_id}
        self._create = create
        self._created_at = created_at
        self._sse = sse
        self._sequence = 0
        self._pieces: list[str] = []
        self._encoded = bytearray()  # the inside of the JSON string of the whole text, which the last events repeat
        self._opened = False
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._logprobs: list[bytes] | None = None if create.logprobs is None else []  # to repeat, while they are short
        self._logprobs_bytes = 0
        self._plain = create.logprobs is None and not create.return_token_ids
        head = {"type": "response.output_text.delta", **self._place, **({"logprobs": []} if self._plain else {})}
        before, self._delta_tail = (b"event: response.output_text.delta\ndata: ", b"}\n\n") if sse else (b"", b"}")
        self._delta_head = before + _encode(head | self._stream)[:-1] + b',"sequence_number":'

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._pieces)

    def begin(self) -> tuple[bytes, ...]:
        """Say that the request was accepted and that it is being answered."""
        return (
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        )

    def open(self) -> tuple[bytes, ...]:
        """Say that text follows, if any does: a warm-up has none."""
        assert not self._opened
        if self._create.warm_up:
            return ()
        self._opened = True
        return (
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", whole=False)),
            self._event("response.content_part.added", **self._place, part=_part("")),
        )

    def deltas(self, reply: Text) -> tuple[bytes, ...]:
        """Say the next piece of text; one that was held back for long with its log probabilities, in several events."""
        if len(reply.logprobs) <= LOGPROBS_A_DELTA_MAX or self._create.logprobs is None:
            return (self.delta(reply),)
        return tuple(map(self.delta, split_text(reply, LOGPROBS_A_DELTA_MAX)))

    def delta(self, reply: Text) -> bytes:
        """Say the next piece of text in one event, however long it gets."""
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
        return b'%b%d,"delta":%b,"logprobs":%b%b%b' % (
            self._delta_head,
            number,
            text,
            logprobs,
            ids,
            self._delta_tail,
        )

    def finish(self, ended: ChoiceEnded, usage: Usage) -> tuple[bytes, ...]:
        """Say that the answer ended by itself, or at the most tokens that were asked for."""
        if self._create.warm_up:
            return (self._event("response.completed", response=self._response("completed", usage=usage)),)
        opening = () if self._opened else self.open()
        if ended.reason is FinishReason.LENGTH:
            return (*opening, *self._incomplete("max_output_tokens", usage))
        response = self._response("completed", usage=usage, item="completed")
        return (*opening, *self._close("completed"), self._event("response.completed", response=response))

    def cancelled(self, usage: Usage | None = None) -> tuple[bytes, ...]:
        """Say that the response ended early because its client sent `response.cancel`."""
        return self._incomplete("cancelled", usage)

    def failed(self, error: RequestError, usage: Usage | None = None) -> bytes:
        """Say that the response, which had begun, failed; what was said of it so far is marked incomplete."""
        code = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}
        said = {
            # the codes here are a closed set of OpenAI's, so ours stands beside them
            "code": code.get(error_type(error), "server_error"),
            "message": error.detail,
            "param": error.param,
            "type": error_type(error),
            "cause": error.code,
        }
        response = self._response("failed", usage=usage, item="incomplete" if self._opened else None)
        return self._event("response.failed", response=response | {"error": said})

    def _incomplete(self, reason: str, usage: Usage | None) -> tuple[bytes, ...]:
        closing = self._close("incomplete") if self._opened else ()
        response = self._response("incomplete", usage=usage, item="incomplete" if self._opened else None)
        response["incomplete_details"] = {"reason": reason}
        return (*closing, self._event("response.incomplete", response=response))

    def _close(self, status: str) -> tuple[bytes, ...]:
        text = self._whole_text()
        logprobs = msgspec.Raw(b"[" + b",".join(self._logprobs or ()) + b"]")
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=_part(text)),
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
        return _item(self._item_id, status, [_part(self._whole_text())] if whole else [])

    def _response(self, status: str, *, usage: Usage | None = None, item: str | None = None) -> dict[str, object]:
        output = [] if item is None else [self._item(item)]
        return _response(self._create, self.id, self._created_at, status, output, usage)


class Completion(AnswerBuilder):
    """The body that answers a request without a stream."""

    def __init__(self, create: CreateHttp, *, request_id: str, created_at: int) -> None:
        super().__init__(1, ids=bool(create.return_token_ids), logprobs=create.logprobs is not None)
        self._create, self._request_id, self._created_at = create, request_id, created_at

    def add_logprobs(self, choice: Choice, text: Text) -> None:
        """Take the log probabilities of the next piece of a choice."""
        extend(choice.logprobs, logprob_entries(text.logprobs))

    def finish(self, answered: Answered) -> AnswerBody:
        """Return the body of the whole answer."""
        [choice] = self.whole()
        assert choice.ended is not None
        short = choice.ended.reason is FinishReason.LENGTH
        status = "incomplete" if short else "completed"
        name = response_id(self._request_id)
        response = _response(self._create, name, self._created_at, status, (), answered.usage)
        if short:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        before, after = _around(response, "output")
        item_before, item_after = _around(_item(_item_id(self._request_id), status, ()), "content")
        parts: list[bytes | bytearray] = [before, b"[", item_before]
        parts += [b'[{"type":"output_text","text":"', choice.text]
        parts += [b'","annotations":[],"logprobs":[', choice.logprobs]
        if self._ids:
            parts += [b'],"token_ids":[', choice.ids]
        return AnswerBody.from_parts([*parts, b"]}]", item_after, b"]", after])


def _around(said: dict[str, object], name: str) -> tuple[bytes, bytes]:
    """Return the JSON of an object up to the value of a field, and from there on."""
    at = list(said).index(name)
    before, after = dict(list(said.items())[:at]), dict(list(said.items())[at + 1 :])
    return b'%b%b"%b":' % (_encode(before)[:-1], b"," if before else b"", name.encode()), (
        b"," * bool(after) + _encode(after)[1:]
    )


def _response(
    create: AnyCreate, name: str, created_at: int, status: str, output: Sequence[object], usage: Usage | None
) -> dict[str, object]:
    short = create.instructions is not None and len(create.instructions) <= INSTRUCTIONS_ECHOED_MAX
    return {
        "id": name,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": create.instructions if short else None,
        "max_output_tokens": create.max_output_tokens,
        "metadata": create.metadata or {},
        "model": create.model,
        "output": output,
        "parallel_tool_calls": create.parallel_tool_calls is not False,
        "previous_response_id": create.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": create.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": create.temperature,
        "text": {"format": _format(create.format)},
        "tool_choice": "auto" if create.tool_choice is None else create.tool_choice.said,
        "tools": [],
        "top_logprobs": create.top_logprobs or 0,
        "top_p": create.top_p,
        "truncation": create.truncation or "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": create.user,
    }


def _format(wanted: TextFormat | None) -> dict[str, object]:
    if wanted is None or wanted.schema is None:
        return {"type": "text" if wanted is None else wanted.type}
    short = len(wanted.schema.text) + len(wanted.description or "") <= FORMAT_ECHOED_MAX
    return {
        "type": wanted.type,
        "name": wanted.name,
        "description": wanted.description if short else None,
        "schema": msgspec.Raw(wanted.schema.text.encode() if short else b"{}"),
        "strict": wanted.strict,
    }


def _item_id(request_id: str) -> str:
    return f"msg_{request_id}"


def _item(name: str, status: str, content: Sequence[object]) -> dict[str, object]:
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str | msgspec.Raw, logprobs: Sequence[object] = ()) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

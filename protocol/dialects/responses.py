"""OpenAI Responses in WebSocket mode: what clients ask, and the events of one answer as ready bytes.

OpenAI has no event that cancels; `response.cancel` is an extension under the Realtime dialect's name. Fields that ask
for nothing special are accepted, fields that this server doesn't fulfil are refused by name, and none is dropped in
silence, except `stream` and `background`, which mean nothing on a socket and which stock clients send all the same.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

import attrs
import msgspec
from attrs import frozen

from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.messages import Finished, FinishReason, Respond, Role, Turn, Usage

from .body import decode, read, refusal
from .http import error_object, error_type
from .mistakes import describe
from .options import Holds, Matches, Name, Options, TokenCount, respond
from .structure import Harmless, tag

INSTRUCTIONS_ECHOED_MAX = 1024  # stock clients take frames of 1 MiB at most, so what is long is not said back
STREAM_ID = "[A-Za-z0-9_.-]{1,256}"

StreamId = Annotated[str, Matches(STREAM_ID, "1 to 256 of the characters A-Z a-z 0-9 _ . -")]
MetadataKey = Annotated[str, Holds(0, 64)]
MetadataValue = Annotated[str, Holds(0, 512)]

_encode = msgspec.json.Encoder().encode


@frozen
class Part:
    """A piece of text; images, audio and files are other types."""

    harmless: ClassVar[Harmless] = {"annotations": (list,), "logprobs": (list,)}  # they describe an answer of before

    type: Literal["input_text", "output_text"] = attrs.field(metadata=tag())
    text: str


@frozen
class Item:
    """One message of the conversation."""

    harmless: ClassVar[Harmless] = {"id": (str,), "status": (str,), "phase": (str,)}

    role: Role
    content: str | tuple[Part, ...]
    type: Literal["message"] = attrs.field(default="message", metadata=tag())

    def turn(self) -> Turn:
        """Return the message as the processor knows it; its pieces follow each other with nothing in between."""
        content = self.content
        return Turn(self.role, content if isinstance(content, str) else "".join(part.text for part in content))


@frozen(kw_only=True)
class Create(Options):
    """`response.create`: answer this conversation."""

    harmless: ClassVar[Harmless] = {
        "stream": (bool,),
        "background": (bool,),
        "generate": (True,),
        "store": (False,),  # a response lives in its connection's memory only
        "truncation": ("disabled",),
        "parallel_tool_calls": (bool,),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "max_tool_calls": (),
        "text": ({}, {"format": {"type": "text"}}),
        "reasoning": ({},),
        "include": ([],),
        "service_tier": ("auto", "default"),
        "user": (str,),
        "safety_identifier": (str,),
        "prompt_cache_key": (str,),
        "prompt_cache_retention": ("in_memory",),
        "prompt_cache_options": ({},),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "access_programs": (),
    }

    type: Literal["response.create"]
    model: Name
    input: str | Annotated[tuple[Item, ...], Holds(1)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: TokenCount | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Holds(0, 16)] | None = None
    stream_id: StreamId | None = None

    def turns(self) -> tuple[Turn, ...]:
        """Return what was said in this request, instructions apart: they do not outlive it, and this does."""
        if isinstance(self.input, str):
            return (Turn(Role.USER, self.input),)
        return tuple(item.turn() for item in self.input)


@frozen(kw_only=True)
class CancelResponse:
    """`response.cancel`: end the response of this id, or whatever runs in this lane."""

    type: Literal["response.cancel"]
    response_id: Name | None = None
    stream_id: StreamId | None = None


def parse(text: str, *, default_model: str | None = None) -> Create | CancelResponse:
    """Return the event that a client sent, or raise a `RequestError` that lists all its mistakes."""
    data = decode(text)
    kind = data.get("type")
    if kind == "response.cancel":
        return read(data, CancelResponse)
    if kind == "response.create":
        if default_model is not None and data.get("model") is None:
            data["model"] = default_model
        create = read(data, Create)
        if mistakes := tuple(create.disagreements(create.max_output_tokens, "max_output_tokens")):
            raise refusal(mistakes)
        return create
    known = '"response.create" or "response.cancel"'
    if isinstance(kind, str):
        raise Unsupported(f"type: {describe(kind)} is not an event of this server; send {known}", param="type")
    said = f"got {describe(kind)}" if "type" in data else "it is missing"
    raise BadRequest(f"type: expected {known}, {said}", param="type")


def stream_id_of(text: str) -> str | None:
    """Return the lane that an event which could not be parsed names, if that much can be read."""
    try:
        stream_id = decode(text).get("stream_id")
    except RequestError:
        return None
    return stream_id if isinstance(stream_id, str) and re.fullmatch(STREAM_ID, stream_id) else None


def to_respond(create: Create, *, request_id: str, history: tuple[Turn, ...] = ()) -> Respond:
    """Return the request for a processor; `history` is what was said in the responses before, instructions apart."""
    first = () if create.instructions is None else (Turn(Role.SYSTEM, create.instructions),)
    return respond(
        create,
        request_id=request_id,
        turns=first + history + create.turns(),
        tokens_max=create.max_output_tokens,
        params={"turns": "input", "tokens_max": "max_output_tokens", "tokens_min": "min_tokens"},
    )


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
    """Builds the events of one response in their order: begin, open, delta..., and one of the three ends."""

    def __init__(self, create: Create, *, request_id: str, created_at: int) -> None:
        self.id = response_id(request_id)
        self._item_id = f"msg_{request_id}"
        self._stream = {} if create.stream_id is None else {"stream_id": create.stream_id}
        self._create = create
        self._created_at = created_at
        self._sequence = 0
        self._pieces: list[str] = []
        self._opened = False
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        head = {"type": "response.output_text.delta", **self._place, "logprobs": [], **self._stream}
        self._delta_head = _encode(head)[:-1] + b',"sequence_number":'

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
        """Say that text follows."""
        assert not self._opened
        self._opened = True
        return (
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", whole=False)),
            self._event("response.content_part.added", **self._place, part=_part("")),
        )

    def delta(self, text: str) -> bytes:
        """Say the next piece of text."""
        number = self._sequence
        self._sequence = number + 1
        self._pieces.append(text)
        return b'%b%d,"delta":%b}' % (self._delta_head, number, _encode(text))

    def finish(self, finished: Finished) -> tuple[bytes, ...]:
        """Say that the answer ended by itself, or at the most tokens that were asked for."""
        opening = () if self._opened else self.open()
        if finished.reason is FinishReason.LENGTH:
            return (*opening, *self._incomplete("max_output_tokens", finished.usage))
        response = self._response("completed", usage=finished.usage, item="completed")
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
        text = self.text
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(status)),
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        return _encode({"type": kind, "sequence_number": number, **self._stream, **fields})

    def _item(self, status: str, *, whole: bool = True) -> dict[str, object]:
        content = [_part(self.text)] if whole else []
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, *, usage: Usage | None = None, item: str | None = None) -> dict[str, object]:
        create = self._create
        short = create.instructions is not None and len(create.instructions) <= INSTRUCTIONS_ECHOED_MAX
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": create.instructions if short else None,
            "max_output_tokens": create.max_output_tokens,
            "metadata": create.metadata or {},
            "model": create.model,
            "output": [] if item is None else [self._item(item)],
            "parallel_tool_calls": True,
            "previous_response_id": create.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": create.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": create.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": None,
        }


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

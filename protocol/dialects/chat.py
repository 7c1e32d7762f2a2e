"""OpenAI chat completions: what clients ask, and the chunks of one answer as ready server-sent events.

Every load tool parses these chunks a little differently. What keeps all of them happy: no comments and no `event:`
lines, no chunk that holds the role alone, and usage last before `[DONE]`, in a chunk without choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import attrs
import msgspec
from attrs import frozen

from protocol.errors import RequestError
from protocol.messages import Finished, Respond, Role, Turn, Usage

from .body import decode, read, refusal
from .http import error_body
from .mistakes import Mistake
from .options import Holds, Name, Options, TokenCount, respond
from .structure import Harmless, tag

_encode = msgspec.json.Encoder().encode


@frozen
class Part:
    """A piece of text; images and audio are other types."""

    type: Literal["text"] = attrs.field(metadata=tag())
    text: str


@frozen
class Message:
    """One message of the conversation; those of tools are not supported."""

    harmless: ClassVar[Harmless] = {  # stock clients send an assistant's message back with all that they got
        "name": ("",),
        "refusal": ("",),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "reasoning_content": ("",),
        "reasoning": ("",),
    }

    role: Role = attrs.field(metadata=tag())
    content: str | tuple[Part, ...] | None = None

    def turn(self) -> Turn:
        """Return the message as the processor knows it; its pieces follow each other with nothing in between."""
        content = self.content or ""
        return Turn(self.role, content if isinstance(content, str) else "".join(part.text for part in content))


@frozen
class StreamOptions:
    """What a stream carries beside text."""

    harmless: ClassVar[Harmless] = {
        "include_obfuscation": (False,),
        "continuous_usage_stats": (bool,),  # guidellm always asks for it, and reads the last chunk's usage only
    }

    include_usage: bool | None = None


@frozen(kw_only=True)
class ChatRequest(Options):
    """The body of `POST /v1/chat/completions`."""

    harmless: ClassVar[Harmless] = {
        "n": (1,),
        "best_of": (1,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (bool,),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
        "verbosity": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "user": (str,),
        "safety_identifier": (str,),
        "metadata": (dict,),
        "prompt_cache_key": (str,),
        "prompt_cache_retention": ("in_memory",),
        "prompt_cache_options": ({},),
        "chat_template_kwargs": ({},),
        "echo": (False,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "skip_special_tokens": (True,),
        "return_cached_tokens_details": (False,),
    }

    model: Name
    messages: Annotated[tuple[Message, ...], Holds(1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that says what the request cost."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def tokens_max(self) -> int | None:
        """The most tokens to answer with, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_max_spelled(self) -> str:
        """The name that the client gave to `tokens_max`."""
        old = self.max_completion_tokens is None and self.max_tokens is not None
        return "max_tokens" if old else "max_completion_tokens"

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what is wrong between fields that are each right."""
        for index, message in enumerate(self.messages):
            if message.content is None:
                yield Mistake(f"messages[{index}].content", "is missing")
        if self.max_tokens not in (None, self.tokens_max):
            yield Mistake("max_tokens", "differs from max_completion_tokens, which is its newer name; send one")
        yield from self.disagreements(self.tokens_max, self.tokens_max_spelled)


def parse(body: bytes) -> ChatRequest:
    """Return the request that a client sent, or raise a `RequestError` that lists all its mistakes."""
    request = read(decode(body), ChatRequest)
    if mistakes := tuple(request.mistakes()):
        raise refusal(mistakes)
    return request


def to_respond(request: ChatRequest, *, request_id: str) -> Respond:
    """Return the request for a processor."""
    return respond(
        request,
        request_id=request_id,
        turns=tuple(message.turn() for message in request.messages),
        tokens_max=request.tokens_max,
        params={"turns": "messages", "tokens_max": request.tokens_max_spelled, "tokens_min": "min_tokens"},
    )


def completion_id(request_id: str) -> str:
    """Return how clients know the answer to a request."""
    return f"chatcmpl-{request_id}"


class Chunks:
    """Builds the server-sent events of one answer: text..., and then one of the two ends."""

    def __init__(self, request: ChatRequest, *, request_id: str, created: int) -> None:
        self._includes_usage = request.includes_usage
        self._shared = _shared("chat.completion.chunk", request, request_id, created)
        shared = self._shared | ({"usage": None} if self._includes_usage else {})
        head = b"data: " + _encode(shared)[:-1] + b',"choices":[{"index":0,"delta":{'
        self._head = head + b'"role":"assistant","content":'  # until the first text has taken the role along
        self._next_head = head + b'"content":'
        self._last_head = head

    def text(self, text: str) -> bytes:
        """Say the next piece of text."""
        head, self._head = self._head, self._next_head
        return b'%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (head, _encode(text))

    def finish(self, finished: Finished) -> bytes:
        """Say that the answer is whole, and what it cost if that was asked."""
        silent = self._head is not self._next_head
        said = b'"role":"assistant","content":""' if silent else b""
        last = b'%b%b},"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._last_head,
            said,
            _encode(finished.reason),
        )
        if self._includes_usage:
            last += b"data: " + _encode(self._shared | {"choices": [], "usage": _usage(finished.usage)}) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        """Say that the answer failed; no `[DONE]` follows, so that it never looks whole."""
        return b"data: " + error_body(error) + b"\n\n"


def completion(request: ChatRequest, *, request_id: str, created: int, text: str, finished: Finished) -> bytes:
    """Return the body that answers a request without a stream."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finished.reason,
    }
    shared = _shared("chat.completion", request, request_id, created)
    return _encode(shared | {"choices": [choice], "usage": _usage(finished.usage)})


def _shared(kind: str, request: ChatRequest, request_id: str, created: int) -> dict[str, object]:
    return {
        "id": completion_id(request_id),
        "object": kind,
        "created": created,
        "model": request.model,
        "system_fingerprint": None,
    }


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }

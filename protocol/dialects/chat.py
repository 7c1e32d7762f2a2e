"""OpenAI chat completions: what clients ask, and the chunks of one answer as ready server-sent events.

Every load tool parses these chunks a little differently. What keeps all of them happy: no comments and no `event:`
lines, no chunk that holds the role alone, and usage last before `[DONE]`, in a chunk without choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal

import attrs
import msgspec
from attrs import frozen

from protocol.errors import RequestError
from protocol.messages import Answered, ChoiceEnded, Respond, Role, Text, TokenText, Turn, Usage

from .body import decode, read, refusal
from .gathered import Choice, Gathered
from .http import error_body
from .logprobs import listed
from .mistakes import Mistake
from .options import ChoiceOptions, Holds, Name, TokenCount, TopLogprobs, respond
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


@frozen(kw_only=True)
class ChatRequest(ChoiceOptions):
    """The body of `POST /v1/chat/completions`."""

    harmless: ClassVar[Harmless] = {
        "best_of": (1,),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (bool,),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "reasoning_effort": (),
        "verbosity": ("medium",),
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
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

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
        if self.top_logprobs and not self.logprobs:
            yield Mistake("top_logprobs", "needs logprobs to be true")
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
        n=request.choices,
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        params={"turns": "messages", "tokens_max": request.tokens_max_spelled, "logprobs": "top_logprobs"},
    )


def completion_id(request_id: str) -> str:
    """Return how clients know the answer to a request."""
    return f"chatcmpl-{request_id}"


class Chunks:
    """Builds the server-sent events of one answer: of each choice text... and its end, and then the end of all."""

    def __init__(self, request: ChatRequest, *, request_id: str, created: int) -> None:
        self._includes_usage = request.includes_usage
        self._logprobs = bool(request.logprobs)
        self._ids = bool(request.return_token_ids)
        self._shared = _shared("chat.completion.chunk", request, request_id, created)
        shared = self._shared | ({"usage": None} if self._includes_usage else {})
        self._head = b"data: " + _encode(shared)[:-1] + b',"choices":[{"index":'
        self._heads: dict[int, bytes] = {}  # of each choice that has said its role
        self._unended = request.choices

    def text(self, reply: Text) -> bytes:
        """Say the next piece of a choice."""
        head = self._heads.get(reply.choice) or self._first(reply.choice)
        if not self._logprobs and not self._ids:
            return b'%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (head, _encode(reply.text))
        logprobs = _encode(_logprobs(reply.logprobs)) if self._logprobs else b"null"
        ids = b',"token_ids":' + _encode(reply.ids) if self._ids else b""
        return b'%b%b},"logprobs":%b,"finish_reason":null%b}]}\n\n' % (head, _encode(reply.text), logprobs, ids)

    def choice_ended(self, ended: ChoiceEnded) -> bytes:
        """Say that a choice is whole."""
        self._unended -= 1
        if ended.choice in self._heads:
            head = b'%b%d,"delta":{' % (self._head, ended.choice)
        else:
            head = self._first(ended.choice) + b'""'
        return b'%b},"logprobs":null,"finish_reason":%b}]}\n\n' % (head, _encode(ended.reason))

    def _first(self, choice: int) -> bytes:
        """Begin the first chunk of a choice, which takes its role along.

        OpenAI's own client counts on new choices in their order, so those before this one are named, too.
        """
        out = b""
        for each in range(len(self._heads), choice + 1):
            head = b'%b%d,"delta":{"role":"assistant","content":' % (self._head, each)
            out += head if each == choice else head + b'""},"logprobs":null,"finish_reason":null}]}\n\n'
            self._heads[each] = b'%b%d,"delta":{"content":' % (self._head, each)
        return out

    def finish(self, answered: Answered) -> bytes:
        """Say that the answer is whole, and what it cost if that was asked."""
        assert self._unended == 0  # else it would look whole and not be
        last = b""
        if self._includes_usage:
            last = b"data: " + _encode(self._shared | {"choices": [], "usage": usage_object(answered.usage)}) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        """Say that the answer failed; no `[DONE]` follows, so that it never looks whole."""
        return b"data: " + error_body(error) + b"\n\n"


def completion(request: ChatRequest, *, request_id: str, created: int, gathered: Gathered, answered: Answered) -> bytes:
    """Return the body that answers a request without a stream."""
    choices = [_choice(request, index, choice) for index, choice in enumerate(gathered.whole(request.choices))]
    shared = _shared("chat.completion", request, request_id, created)
    return _encode(shared | {"choices": choices, "usage": usage_object(answered.usage)})


def _choice(request: ChatRequest, index: int, choice: Choice) -> dict[str, object]:
    said: dict[str, object] = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _logprobs(choice.logprobs) if request.logprobs else None,
        "finish_reason": choice.reason,
    }
    return said | ({"token_ids": choice.ids} if request.return_token_ids else {})


def _logprobs(tokens: Iterable[TokenText]) -> dict[str, object]:
    return {"content": listed(tokens), "refusal": None}


def _shared(kind: str, request: ChatRequest, request_id: str, created: int) -> dict[str, object]:
    return {
        "id": completion_id(request_id),
        "object": kind,
        "created": created,
        "model": request.model,
        "system_fingerprint": None,
    }


def usage_object(usage: Usage) -> dict[str, object]:
    """Return what a request cost, in the shape of chat completions and completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }

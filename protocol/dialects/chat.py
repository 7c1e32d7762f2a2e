"""OpenAI chat completions: the requests, and the chunks of one answer as server-sent events.

Every load tool parses these chunks a little differently. All of them work with: no comments and no `event:` lines, no
chunk that has the role alone, and usage last before `[DONE]`, in a chunk without choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

import msgspec
from attrs import evolve, frozen

from protocol.dialects.answer_builder import CALLS_REASON, ChoiceParts, extend
from protocol.dialects.chat_messages import ChatMessage, call_mistakes, prefix_mistakes
from protocol.dialects.choices import ChoiceChunks, ChoicesBody, common_fields
from protocol.dialects.logprobs import logprob_entries
from protocol.dialects.media_parts import excess, media_count
from protocol.dialects.options import ChoiceOptions, Name, TokenCount, TopLogprobs, respond
from protocol.dialects.other_servers import CHAT_KEYS, GENERATION_KEYS
from protocol.dialects.rendering import ChatTemplateKwargs, Effort, continuation_mistakes, ending_mistakes, rendering
from protocol.dialects.request_body import decode, read
from protocol.dialects.tools import ChosenTool, Tools, call_id, chat_tools, choice_mistakes, tool_mistakes, with_choice
from protocol.messages.generation import FinishReason
from protocol.messages.text import AnswerPiece, CallPart, ChoiceEnded, Reasoning, Respond, Text
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import FieldCheck, Harmless

_encode = msgspec.json.Encoder().encode


@frozen(kw_only=True)
class ChatRequest(ChoiceOptions):
    """The body of `POST /v1/chat/completions`."""

    harmless: ClassVar[Harmless] = {
        **GENERATION_KEYS,
        **CHAT_KEYS,
        "best_of": (1,),
        "functions": ([],),
        "function_call": ("auto", "none"),
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
        "client_metadata": (dict,),
        "reasoning": ({},),  # of Responses; here the effort is a field of its own
        "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "echo": (False,),
    }

    model: Name
    messages: Annotated[tuple[ChatMessage, ...], Holds(1)]
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def tokens_max(self) -> int | None:
        """The most tokens to generate, by either name of the field."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_max_field(self) -> str:
        """The name that the client gave to `tokens_max`."""
        deprecated = self.max_completion_tokens is None and self.max_tokens is not None
        return "max_tokens" if deprecated else "max_completion_tokens"

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            self._check_media,
            self._check_tokens_max,
            self._check_logprobs,
            self._check_tools,
            self._check_calls,
            self._check_ending,
            self._check_continuation,
            self._check_prefix,
            *super().checks(),
        )

    def _check_media(self) -> Iterator[Mistake]:
        yield from excess(sum(media_count(message.content) for message in self.messages), "messages")

    def _check_tokens_max(self) -> Iterator[Mistake]:
        if self.max_tokens not in (None, self.tokens_max):
            yield Mistake("max_tokens", "differs from max_completion_tokens, which is its newer name; send one")

    def _check_logprobs(self) -> Iterator[Mistake]:
        if self.top_logprobs and not self.logprobs:
            yield Mistake("top_logprobs", "needs logprobs to be true")

    def _check_tools(self) -> Iterator[Mistake]:
        names = [tool.function.name for tool in self.tools or ()]
        yield from tool_mistakes(self.tools or ())
        yield from choice_mistakes(self.tool_choice, names)

    def _check_calls(self) -> Iterator[Mistake]:
        yield from call_mistakes(self.messages)

    def _check_ending(self) -> Iterator[Mistake]:
        yield from ending_mistakes(self)

    def _check_continuation(self) -> Iterator[Mistake]:
        yield from continuation_mistakes(self, self.messages[-1].role)

    def _check_prefix(self) -> Iterator[Mistake]:
        yield from prefix_mistakes(self.messages, self)


def parse(body: bytes) -> ChatRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), ChatRequest)


def to_respond(request: ChatRequest, *, request_id: str) -> Respond:
    """Return the request for a processor."""
    tools = chat_tools(request.tools, request.tool_choice)
    prefix = request.messages[-1].prefix
    made = respond(
        request,
        request_id=request_id,
        turns=tuple(message.turn(index) for index, message in enumerate(request.messages)),
        rendering=rendering(request, request.reasoning_effort, "reasoning_effort", prefix=prefix, tools=tools),
        tokens_max=request.tokens_max,
        n=request.choices,
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        params={"turns": "messages", "tokens_max": request.tokens_max_field, "logprobs": "top_logprobs"},
    )
    return with_choice(made, request.tool_choice, parallel=request.parallel_tool_calls)


def completion_id(request_id: str) -> str:
    """Return the `id` of the answer to a request."""
    return f"chatcmpl-{request_id}"


class Chunks(ChoiceChunks):
    """The chunks of a chat completion; the first chunk of a choice has the role, too.

    Calls come one after the other. The first chunk of a call has its id, its name and empty arguments.
    """

    def __init__(self, request: ChatRequest, *, request_id: str, created: int) -> None:
        common = common_fields("chat.completion.chunk", completion_id(request_id), created=created, model=request.model)
        super().__init__(request, common, choices=request.choices, logprobs=bool(request.logprobs), closing=b"}")
        self._request_id = request_id
        self._calling: set[int] = set()  # choices with calls

    def piece(self, reply: AnswerPiece) -> bytes:
        """Return the chunks with the next piece of a choice."""
        match reply:
            case Text():
                return self.text(reply)
            case Reasoning():
                return self._delta(reply, {"reasoning_content": reply.text})
            case CallPart():
                self._calling.add(reply.choice)
                first = b""
                if reply.name:
                    name = call_id(self._request_id, reply.choice, reply.index)
                    function = {"name": reply.name, "arguments": ""}
                    call = {"index": reply.index, "id": name, "type": "function", "function": function}
                    first = self._delta(evolve(reply, logprobs=(), ids=()), {"tool_calls": [call]})
                more = {"index": reply.index, "function": {"arguments": reply.arguments}}
                return first + self._delta(reply, {"tool_calls": [more]})

    def _delta(self, reply: AnswerPiece, delta: dict[str, object]) -> bytes:
        """Return the chunk with a piece that is no text."""
        before = b""
        if reply.choice not in self._heads:
            before = self._begin_others(reply.choice)
            self._set_head(reply.choice)
            delta = {"role": "assistant", "content": None, **delta}
        logprobs = _encode(self._logprobs_of(reply)) if self._logprobs and reply.logprobs else b"null"
        ids = b',"token_ids":' + _encode(reply.ids) if self._ids else b""
        return b'%b%b%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}]}\n\n' % (
            before,
            self._start,
            reply.choice,
            _encode(delta),
            logprobs,
            ids,
        )

    def _begin(self, choice: int) -> bytes:
        """Return the first chunk of a choice up to its text, after those of earlier choices."""
        before = self._begin_others(choice)
        self._set_head(choice)
        return before + self._first_head(choice)

    def _begin_others(self, choice: int) -> bytes:
        """Return empty chunks of earlier choices that have not begun: OpenAI's own client expects them in order."""
        chunks = b""
        for index in range(len(self._heads), choice):
            chunks += self._first_head(index) + b'""' + self._plain_end
            self._set_head(index)
        return chunks

    def _first_head(self, choice: int) -> bytes:
        return b'%b%d,"delta":{"role":"assistant","content":' % (self._start, choice)

    def _set_head(self, choice: int) -> None:
        self._heads[choice] = b'%b%d,"delta":{"content":' % (self._start, choice)

    def _last_head(self, choice: int) -> bytes:
        return b'%b%d,"delta":{' % (self._start, choice) if choice in self._heads else self._begin(choice) + b'""'

    def _reason(self, ended: ChoiceEnded) -> bytes:
        called = ended.choice in self._calling and ended.reason is FinishReason.STOP
        return CALLS_REASON if called else super()._reason(ended)

    def _logprobs_of(self, reply: AnswerPiece) -> dict[str, object]:
        return {"content": logprob_entries(reply.logprobs), "refusal": None}


class Completion(ChoicesBody):
    """The body that answers a request without a stream."""

    def __init__(self, request: ChatRequest, *, request_id: str, created: int) -> None:
        common = common_fields("chat.completion", completion_id(request_id), created=created, model=request.model)
        around = (b'"message":{"role":"assistant","content":"', b'","refusal":null}')
        super().__init__(request, common, choices=request.choices, logprobs=bool(request.logprobs), around=around)
        self._request_id = request_id

    def add_call(self, choice: ChoiceParts, part: CallPart) -> None:
        """Add the next part of a call to a choice."""
        if part.name:
            name = _encode(call_id(self._request_id, part.choice, part.index))
            before = b'"}},' if choice.calls else b""
            head = b'%b{"id":%b,"type":"function","function":{"name":%b,"arguments":"'
            choice.calls += head % (before, name, _encode(part.name))
        choice.calls += _encode(part.arguments)[1:-1]

    def add_logprobs(self, choice: ChoiceParts, text: AnswerPiece) -> None:
        """Add the log probabilities of the next piece of a choice."""
        extend(choice.logprobs, logprob_entries(text.logprobs))

    def _around_text(self, choice: ChoiceParts) -> Iterable[bytes | bytearray]:
        if not choice.reasoning and not choice.calls:
            return super()._around_text(choice)
        # An answer without a text of its own has null, as OpenAI's.
        text = (b'"', choice.text, b'"') if choice.text else (b"null",)
        thought = (b',"reasoning_content":"', choice.reasoning, b'"') if choice.reasoning else ()
        calls = (b',"tool_calls":[', choice.calls, b'"}}]') if choice.calls else ()
        head = b'"message":{"role":"assistant","content":'
        return (head, *text, b',"refusal":null', *thought, *calls, b"}")

    def _logprobs_parts(self, _: int, choice: ChoiceParts) -> Iterable[bytes | bytearray]:
        return (b'{"content":[', choice.logprobs, b'],"refusal":null}')

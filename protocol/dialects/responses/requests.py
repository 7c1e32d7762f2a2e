"""OpenAI Responses: the requests of clients, over WebSocket and over HTTP.

OpenAI has no event that cancels; `response.cancel` is an extension with the name that the Realtime API gives it. Fields
with a neutral value are accepted, unimplemented fields are refused by name, and none is ignored silently. The
exceptions are `stream` and `background` on a WebSocket: they mean nothing there, and stock clients send them
nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from attrs import evolve, frozen

from protocol.dialects.formats import TextFormat
from protocol.dialects.media_parts import excess, media_count
from protocol.dialects.options import Name, Options, TokenCount, TopLogprobs, respond
from protocol.dialects.other_servers import GENERATION_KEYS
from protocol.dialects.rendering import ChatTemplateKwargs, Effort, continuation_mistakes, ending_mistakes, rendering
from protocol.dialects.request_body import as_request_error, decode, read
from protocol.dialects.responses.items import FunctionCallItem, InputItem, continued, turns_of, unknown_calls
from protocol.dialects.responses.output import GivenAnswer
from protocol.dialects.responses.tools import AnyTool, for_model, function_mistakes, places, refused
from protocol.dialects.tools import TOOLS_MAX, ChosenTool, choice_mistakes, offered, with_choice
from protocol.errors import BadRequest, PreviousResponseNotFound, Unsupported
from protocol.messages.generation import Grammar
from protocol.messages.media import Media
from protocol.messages.text import Respond, Role, Turn
from protocol.strict.checks import Holds, Matches
from protocol.strict.expected import either
from protocol.strict.mistakes import Mistake, Mistakes, describe
from protocol.strict.objects import FieldCheck, Harmless
from protocol.strict.structure import structure

STREAM_ID = "[A-Za-z0-9_.-]{1,256}"
LOGPROBS = "message.output_text.logprobs"
# What a response may include. Nothing here is encrypted, and the server runs no tools: only the first has an effect.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
INCLUDED_MAX = 64  # names in `include`, of which OpenAI has about ten

StreamId = Annotated[str, Matches(STREAM_ID, "1 to 256 of the characters A-Z a-z 0-9 _ . -")]
MetadataKey = Annotated[str, Holds(0, 64)]
MetadataValue = Annotated[str, Holds(0, 512)]
Label = Annotated[str, Holds(0, 512)]  # of the end user; it is returned in the response


@frozen
class TextConfig:
    """The format of the text of the answer."""

    harmless: ClassVar[Harmless] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


@frozen
class ReasoningOptions:
    """The effort of reasoning; a summary that is left to the server is none here."""

    harmless: ClassVar[Harmless] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: Effort | None = None


@frozen(kw_only=True)
class ResponseRequest(Options):
    """The fields of a request over WebSocket and over HTTP."""

    harmless: ClassVar[Harmless] = {
        **GENERATION_KEYS,
        "store": (False,),  # responses are kept only by the connection, if at all
        "max_tool_calls": (),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "stream_options": ({}, {"include_obfuscation": False}),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "access_programs": (),
        "client_metadata": (dict,),
    }

    model: Name
    input: str | Annotated[tuple[InputItem, ...], Holds(1)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: TokenCount | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Holds(0, 16)] | None = None
    text: TextConfig | None = None
    include: Annotated[tuple[str, ...], Holds(0, INCLUDED_MAX)] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    tools: Annotated[tuple[AnyTool, ...], Holds(0, TOOLS_MAX)] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: ChosenTool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def effort(self) -> Effort | None:
        """The effort of reasoning."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def logprobs(self) -> int | None:
        """The number of likeliest tokens to return with each token, None for no log probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    @property
    def format(self) -> TextFormat | None:
        """The required format of the text of the answer."""
        return None if self.text is None else self.text.format

    def turns(self) -> tuple[Turn, ...]:
        """Return the turns of this request without its instructions, which later requests do not inherit."""
        if isinstance(self.input, str):
            return (Turn(Role.USER, self.input, param="input"),)
        return turns_of(self.input)

    def format_grammar(self) -> tuple[str, Grammar] | None:
        """Return `text.format` and the grammar that it requires."""
        text: TextConfig | None = getattr(self, "text", None)
        grammar = None if text is None or text.format is None else text.format.grammar()
        return None if grammar is None else ("text.format", grammar)

    @property
    def tokens_max(self) -> int | None:
        """The most tokens to generate."""
        return self.max_output_tokens

    @property
    def tokens_max_field(self) -> str:
        """The name that the client gave to `tokens_max`."""
        return "max_output_tokens"

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            self._check_media,
            self._check_tools,
            self._check_choice,
            self._check_outputs,
            self._check_include,
            self._check_logprobs,
            self._check_ending,
            self._check_continuation,
            *super().checks(),
        )

    def _check_media(self) -> Iterator[Mistake]:
        items = () if isinstance(self.input, str) else self.input
        yield from excess(sum(map(_media_count, items)), "input")

    def _check_tools(self) -> Iterator[Mistake]:
        yield from function_mistakes(self.tools or ())

    def _check_choice(self) -> Iterator[Mistake]:
        yield from choice_mistakes(self.tool_choice, places(self.tools or ()))

    def _check_outputs(self) -> Iterator[Mistake]:
        if self.previous_response_id is None:
            yield from unknown_calls(self.input)

    def _check_include(self) -> Iterator[Mistake]:
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                message = f"{describe(name)} is not supported here; only {either([*map(describe, INCLUDABLE)])} is"
                yield Mistake(f"include[{index}]", message, unsupported=True)

    def _check_logprobs(self) -> Iterator[Mistake]:
        if self.top_logprobs and self.logprobs is None:
            yield Mistake("top_logprobs", f"needs include to name {describe(LOGPROBS)}")

    def _check_ending(self) -> Iterator[Mistake]:
        yield from ending_mistakes(self)

    def _check_continuation(self) -> Iterator[Mistake]:
        last = None if isinstance(self.input, str) else self.input[-1]
        role = Role.USER if last is None else Role.TOOL if isinstance(last, FunctionCallItem) else Role(last.role)
        yield from continuation_mistakes(self, role)


@frozen(kw_only=True)
class Create(ResponseRequest):
    """The event `response.create`: generate the answer to a conversation."""

    harmless: ClassVar[Harmless] = {**ResponseRequest.harmless, "stream": (bool,), "background": (bool,)}

    type: Literal["response.create"]
    stream_id: StreamId | None = None
    generate: bool | None = None

    @property
    def warm_up(self) -> bool:
        """Whether only the prompt is computed, for later requests that begin with it."""
        return self.generate is False


@frozen(kw_only=True)
class CreateHttp(ResponseRequest):
    """The body of `POST /v1/responses`."""

    harmless: ClassVar[Harmless] = {**ResponseRequest.harmless, "background": (False,), "generate": (True,)}

    stream: bool | None = None

    @property
    def stream_id(self) -> None:
        """None: an HTTP connection has no lanes."""
        return

    @property
    def warm_up(self) -> bool:
        """Whether only the prompt is computed, which makes sense on a WebSocket only."""
        return False


@frozen(kw_only=True)
class CancelResponse:
    """The event `response.cancel`: end the response with this id, or the one that runs in this lane."""

    type: Literal["response.cancel"]
    response_id: Name | None = None
    stream_id: StreamId | None = None


C = TypeVar("C", bound=ResponseRequest)


def read_event(
    data: dict[str, object], *, default_model: str | None = None, leave_out: Collection[str] = ()
) -> Create | CancelResponse:
    """Return the event in a decoded message, or raise one `RequestError` with all its mistakes.

    `leave_out`: the types of tools that are left out, where others of their kind are refused.
    """
    kind = data.get("type")
    if kind == "response.cancel":
        return read(data, CancelResponse)
    if kind == "response.create":
        if default_model is not None and data.get("model") is None:
            data["model"] = default_model
        return _read(data, Create, leave_out)
    supported = '"response.create" or "response.cancel"'
    if isinstance(kind, str):
        raise Unsupported(f"type: {describe(kind)} is not an event of this server; send {supported}", param="type")
    seen = f"got {describe(kind)}" if "type" in data else "it is missing"
    raise BadRequest(f"type: expected {supported}, {seen}", param="type")


def parse_http(body: bytes, *, leave_out: Collection[str] = ()) -> CreateHttp:
    """Return the posted request, or raise one `RequestError` with all its mistakes."""
    create = _read(decode(body), CreateHttp, leave_out)
    if create.previous_response_id is not None:
        raise PreviousResponseNotFound(
            f"Previous response with id {describe(create.previous_response_id)} not found: responses are not stored,"
            " and only a WebSocket connection remembers its own; send the whole conversation.",
            param="previous_response_id",
        )
    return create


def _read(data: dict[str, object], cls: type[C], leave_out: Collection[str]) -> C:
    mistakes = tuple(refused(data.get("tools"), leave_out))
    try:
        create = structure(data, cls)
    except Mistakes as error:
        raise as_request_error((*error.mistakes, *mistakes)) from None
    if mistakes:
        raise as_request_error(mistakes)
    return create


def stream_id_of(data: Mapping[str, object]) -> str | None:
    """Return the lane of an event that is otherwise invalid, None if its `stream_id` is invalid, too."""
    stream_id = data.get("stream_id")
    return stream_id if isinstance(stream_id, str) and re.fullmatch(STREAM_ID, stream_id) else None


def turns_with_answer(create: Create, answer: GivenAnswer | None) -> tuple[Turn, ...]:
    """Return the turns of a request and of its answer, for a later request; None if there is no answer.

    An answer that goes on with the last message is a part of it.
    """
    turns = tuple(map(continued, create.turns()))
    if answer is None:
        return turns
    if not create.continue_final_message:
        given = Turn(Role.ASSISTANT, answer.text, reasoning=answer.reasoning, calls=answer.calls)
        return (*turns, continued(given))
    *before, last = turns
    content: str | tuple[str | Media, ...]
    if isinstance(last.content, str):
        content = last.content + answer.text
    else:
        *pieces, end = last.content
        content = (*pieces, f"{end}{answer.text}")
    reasoning, calls = last.reasoning + answer.reasoning, last.calls + answer.calls
    return (*before, evolve(last, content=content, reasoning=reasoning, calls=calls))


def to_respond(
    create: Create | CreateHttp, *, request_id: str, history: tuple[Turn, ...] = (), session: str = ""
) -> Respond:
    """Return the request for a processor; `history` has the turns of earlier responses, without instructions.

    Requests of one `session` share a beginning; a `prompt_cache_key` takes its place. Raises `BadRequest` if there are
    too many images and videos in all, or results of unknown calls.
    """
    instructions = (
        () if create.instructions is None else (Turn(Role.SYSTEM, create.instructions, param="instructions"),)
    )
    turns = instructions + history + create.turns()
    if history:
        media = excess(sum(len(turn.media) for turn in turns), "previous_response_id")
        if mistakes := (*media, *unknown_calls(create.input, history)):
            raise as_request_error(mistakes)
    tools = offered(for_model(create.tools or ()), create.tool_choice)
    asked = respond(
        create,
        request_id=request_id,
        turns=turns,
        rendering=rendering(create, create.effort, "reasoning.effort", tools=tools),
        tokens_max=create.max_output_tokens,
        logprobs=create.logprobs,
        truncate=create.truncation == "auto",
        warm_up=create.warm_up,
        session=session,
        params={"turns": "input", "tokens_max": "max_output_tokens", "logprobs": "top_logprobs"},
    )
    return with_choice(asked, create.tool_choice, parallel=create.parallel_tool_calls)


def _media_count(item: InputItem) -> int:
    parts = getattr(item, "output" if item.role == Role.TOOL else "content", None)
    return media_count(parts)

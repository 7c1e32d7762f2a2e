"""`/tokenize` and `/detokenize`, in the shapes of SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import msgspec
from attrs import frozen

from protocol.dialects.answer_builder import AnswerBody
from protocol.dialects.chat_messages import ChatMessage, call_mistakes, prefix_mistakes
from protocol.dialects.media_parts import media_count
from protocol.dialects.options import Name
from protocol.dialects.prompt import TokenIdList
from protocol.dialects.rendering import ChatTemplateKwargs, Effort, continuation_mistakes, ending_mistakes, rendering
from protocol.dialects.request_body import decode, read
from protocol.dialects.tools import ChosenTool, Tools, chat_tools, choice_mistakes, tool_mistakes
from protocol.messages.text import Detokenize, Detokenized, Tokenize, Tokenized
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import FieldCheck, Harmless

# Limits of one call of the encoder, which holds the GIL while it runs.
CHARACTERS_A_STEP = 64 * 1024
IDS_A_STEP = 16 * 1024

_encode = msgspec.json.Encoder().encode


@frozen(kw_only=True)
class TokenizeRequest:
    """The body of `POST /tokenize`: a text, or a conversation, which the chat template turns into one."""

    harmless: ClassVar[Harmless] = {
        "chat_template": (),
        "return_token_strs": (False,),
    }

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Holds(1)] | None = None
    add_special_tokens: bool | None = None
    tools: Tools | None = None
    tool_choice: ChosenTool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            self._check_kind,
            self._check_special_tokens,
            self._check_media,
            self._check_ending,
            self._check_continuation,
            self._check_prefix,
            self._check_effort,
            self._check_variables,
            self._check_tools,
        )

    def _check_kind(self) -> Iterator[Mistake]:
        if self.prompt is None and self.messages is None:
            yield Mistake("prompt", "is missing, and so is messages; send one")
        if self.prompt is not None and self.messages is not None:
            yield Mistake("messages", "cannot stand beside prompt; send one")

    def _check_special_tokens(self) -> Iterator[Mistake]:
        if self.messages is not None and self.add_special_tokens:
            text = "is for a prompt; the chat template puts around messages what they need"
            yield Mistake("add_special_tokens", text, unsupported=True)

    def _check_ending(self) -> Iterator[Mistake]:
        yield from ending_mistakes(self)

    def _check_continuation(self) -> Iterator[Mistake]:
        if self.messages is not None:
            yield from continuation_mistakes(self, self.messages[-1].role)
        elif self.continue_final_message:
            yield Mistake("continue_final_message", "is for messages")

    def _check_prefix(self) -> Iterator[Mistake]:
        if self.messages is not None:
            yield from prefix_mistakes(self.messages, self)

    def _check_effort(self) -> Iterator[Mistake]:
        if self.messages is None and self.reasoning_effort is not None:
            yield Mistake("reasoning_effort", "is for messages")

    def _check_variables(self) -> Iterator[Mistake]:
        if self.messages is None and self.chat_template_kwargs is not None and self.chat_template_kwargs.values:
            yield Mistake("chat_template_kwargs", "is for messages")

    def _check_tools(self) -> Iterator[Mistake]:
        if self.messages is None and self.tools:
            yield Mistake("tools", "is for messages")
        names = [tool.function.name for tool in self.tools or ()]
        yield from tool_mistakes(self.tools or ())
        yield from choice_mistakes(self.tool_choice, names)
        yield from call_mistakes(self.messages or ())

    def _check_media(self) -> Iterator[Mistake]:
        messages = self.messages or ()
        if (place := next((place for place, one in enumerate(messages) if media_count(one.content)), None)) is not None:
            text = "has images or videos, whose tokens are not counted here; the usage of an answer counts them"
            yield Mistake(f"messages[{place}].content", text, unsupported=True)


@frozen(kw_only=True)
class DetokenizeRequest:
    """The body of `POST /detokenize`."""

    harmless: ClassVar[Harmless] = {"skip_special_tokens": (False,)}  # special tokens are always a part of the text

    model: Name | None = None
    tokens: TokenIdList


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), TokenizeRequest)


def to_tokenize(request: TokenizeRequest) -> Tokenize:
    """Return the request for a processor."""
    if request.messages is not None:
        turns = tuple(message.turn(index) for index, message in enumerate(request.messages))
        prefix = request.messages[-1].prefix
        tools = chat_tools(request.tools, request.tool_choice)
        rendered = rendering(request, request.reasoning_effort, "reasoning_effort", prefix=prefix, tools=tools)
        return Tokenize(turns=turns, rendering=rendered)
    return Tokenize(text=request.prompt or "", special=request.add_special_tokens is not False)


def tokenized(answer: Tokenized) -> AnswerBody:
    """Return the body that answers `POST /tokenize`."""
    ids = answer.ids
    parts = [_encode(ids[start : start + IDS_A_STEP].tolist())[1:-1] for start in range(0, len(ids), IDS_A_STEP)]
    separated = [piece for part in parts for piece in (b",", part)][1:]
    return AnswerBody.from_parts(
        [b'{"tokens":[', *separated, b'],"count":%d,"max_model_len":%d}' % (len(ids), answer.context_max)]
    )


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), DetokenizeRequest)


def to_detokenize(request: DetokenizeRequest) -> Detokenize:
    """Return the request for a processor."""
    return Detokenize(request.tokens.ids)


def detokenized(answer: Detokenized) -> AnswerBody:
    """Return the body that answers `POST /detokenize`, with the text under SGLang's name and under vLLM's."""
    text, step = answer.text, CHARACTERS_A_STEP
    parts = [_encode(text[start : start + step])[1:-1] for start in range(0, len(text), step)]
    return AnswerBody.from_parts([b'{"text":"', *parts, b'","prompt":"', *parts, b'"}'])

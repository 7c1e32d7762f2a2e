"""The judgement of whole choices: what a choice has given out is kept, and its calls wait until they are judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import trio
from attrs import Factory, define, field, frozen

from actors.kit.offload import RunWork
from actors.text.call_grammar import HeldCalls
from actors.text.candidates import Emit
from actors.text.conformance import Judge, SchemaValidator, in_thread
from actors.text.staged_text import PIECES_A_STEP
from protocol.errors import AnswerInvalid, BadRequest
from protocol.messages.generation import Started
from protocol.messages.text import Accepted, AnswerPiece, CallPart, ChoiceEnded, Text

WrittenCall: TypeAlias = tuple[str, str]
"""A call as a model wrote it: the name of its tool, and the JSON text of its arguments."""


@define(eq=False)
class CallConformance:
    """Judges the calls of one request by the schemas of its tools, one choice after the other."""

    held: HeldCalls
    run: RunWork
    param: Callable[[str], str]  # the client's name of a field
    _validators: dict[str, SchemaValidator] = Factory(dict)
    _judging: trio.Lock = field(factory=trio.Lock)

    async def judge(self, calls: Sequence[WrittenCall], *, ended: bool, matched: str | int | None) -> None:
        """Raise `AnswerInvalid` for calls that do not conform; `ended` unless the answer was cut at its length.

        A demanded call is missing where a client's own stop has cut the answer: this raises `BadRequest`.
        """
        if self.held.demanded and ended and not calls:
            name = self.param("tool_choice")
            if matched is None:
                raise AnswerInvalid(f"the answer of the model calls no tool, and {name} demands a call")
            stop = self.param("stop" if isinstance(matched, str) else "stop_token_ids")
            raise BadRequest(f"{stop} ended the answer before the call that {name} demands", param=stop)
        judged = [call for call in calls if call[0] in self.held.schemas]
        size = sum(len(arguments) + len(self.held.schemas[name]) for name, arguments in judged)
        patterns = any('"pattern' in self.held.schemas[name] for name, _ in judged)
        async with self._judging:
            fault = await in_thread(self.run, partial(self._find_fault, judged), size, patterns=patterns)
        if fault is not None:
            raise AnswerInvalid(fault)

    def _find_fault(self, calls: Sequence[WrittenCall]) -> str | None:
        for name, arguments in calls:
            if name not in self._validators:
                self._validators[name] = SchemaValidator.of(self.held.schemas[name])
            if (reason := self._validators[name].find_fault(arguments)) is not None:
                return f"a call of {json.dumps(name)} does not keep to the schema of the tool: {reason}"
        return None


@frozen
class Judges:
    """The judges of the choices of one request."""

    text: Judge | None = None
    calls: CallConformance | None = None


@define(eq=False)
class JudgedChoice:
    """A choice as it was given out, and its waiting replies: calls, and everything behind the first of them."""

    emit: Emit
    holds_calls: bool
    texts: list[str] = Factory(list)
    calls: list[WrittenCall] = Factory(list)
    _waiting: list[AnswerPiece] = Factory(list)

    @property
    def waits(self) -> bool:
        """Whether replies wait."""
        return bool(self._waiting)

    def give(self, reply: Accepted | Started | AnswerPiece | ChoiceEnded) -> None:
        """Keep a reply, and pass it on or let it wait."""
        if isinstance(reply, CallPart):
            self._note_call(reply)
        elif isinstance(reply, Text):
            self.texts.append(reply.text)
        if self._waiting or (self.holds_calls and isinstance(reply, CallPart)):
            assert not isinstance(reply, Accepted | Started | ChoiceEnded)
            self._waiting.append(reply)
        else:
            self.emit(reply)

    async def release(self) -> None:
        """Pass on what waits."""
        waiting, self._waiting = self._waiting, []
        for number, reply in enumerate(waiting):
            if number % PIECES_A_STEP == 0:
                await trio.lowlevel.checkpoint()
            self.emit(reply)
        await trio.lowlevel.checkpoint()

    def _note_call(self, part: CallPart) -> None:
        if part.name:
            self.calls.append((part.name, part.arguments))
        else:
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + part.arguments

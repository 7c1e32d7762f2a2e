"""The part of a format by which an engine can be held to its calls: the grammar of a call, beside its parser.

The parser reads whatever the grammar allows, so both stand in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from actors.text.formats.call_tags import TagPart, json_of
from actors.text.formats.parameter_tags import HeldParameter, Kinds
from actors.text.formats.tool_table import Schema
from protocol.schemas.parameters import ParameterNames


@frozen
class HeldArguments:
    """The arguments of a tool as an engine is held to them."""

    schema: Schema  # an engine's schema, see `protocol.schemas`
    kinds: Kinds = ()  # the parameters apart from each other, for a format with `names`
    listed: Sequence[HeldParameter] = ()  # those that the client's schema names, where any object is allowed

    @property
    def json(self) -> TagPart:
        """The grammar of a JSON object."""
        return json_of(self.schema)


@frozen
class CallFrame:
    """The text around the calls of an answer: before the first, between two, and behind the last.

    A text that goes on with `trigger` has come to a call: `begin`, or else each call, begins with it.
    """

    trigger: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    lead: TagPart | None = None  # what comes before a demanded call, which a free answer writes as text
    alone: bool = False  # an answer has one call at most
    names: ParameterNames | None = None  # of parameters apart from each other; None if arguments are a JSON object
    plain_without: str = ""  # the characters that strings as plain text go without; empty if strings are JSON
    typed: bool = False  # a value says whether it is a string, so that no string is read as another value
    close: str = ""  # what comes behind the last call where `trigger` came before the first


@runtime_checkable
class HeldText(Protocol):
    """A whole format whose text a grammar can hold, though it stands between markers."""

    @property
    def thought_rest(self) -> TagPart:
        """The grammar of the rest of a thought with its end, behind a prompt that begins one."""

    def answer(self, content: TagPart, *, begun: bool) -> TagPart:
        """Return the grammar of an answer whose text is `content`, perhaps behind a thought.

        `begun` if the prompt ends within the text, which goes on.
        """


@runtime_checkable
class HeldFormat(Protocol):
    """A format whose calls a grammar can demand."""

    @property
    def frame(self) -> CallFrame:
        """The text around calls."""

    def call(self, name: str, arguments: HeldArguments) -> TagPart:
        """Return the grammar of one call, made by `tag`."""

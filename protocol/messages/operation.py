"""The row of an operation of an engine, from which everything about the operation is made."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import attrs
from attrs import frozen

from protocol.access import Access
from protocol.messages.kind import Kind, Message
from protocol.messages.leaving import LeavingRequest, MemoryTag


class OperationScope(StrEnum):
    """The engines of an operation; an engine with several ranks, or on several nodes, is asked once."""

    ONE = "one"  # the engine named by the asker
    ENGINES = "engines"  # every engine for tokens, or the one named by the asker
    ALL = "all"  # the same, and every encoder
    MODEL = "model"  # every engine for tokens of the request's `model`, or the one named by the asker


class WeightsSession(StrEnum):
    """The relation of an operation to a session, in which an engine's weights are replaced piece by piece."""

    FREE = "free"  # it may come at any time
    OUTSIDE = "outside"  # no session may be open
    WITHIN = "within"  # one has to be open


@frozen(eq=False, kw_only=True)
class EngineOperation:
    """One operation of an engine."""

    kind: Kind  # the row of its request, with the class of its result
    result_kind: Kind | None = None  # the row of its result, unless another message has the same result
    name: str  # the word of the command line
    participle: str  # the verb of its outcome, as in "engine main/tiny was not flushed"
    summary: str  # one sentence
    within_s: float  # the limit of an engine's answer
    path: str | None = None  # the path of its HTTP route; None: it has none
    methods: tuple[str, ...] = ("POST",)
    access: Access = Access.ADMIN
    scope: OperationScope = OperationScope.ENGINES
    leaves_service: bool = False  # whether an engine is out of service meanwhile, and carries out no other such one
    renews: bool = False  # whether the engine's node carries it out, by a new life of the engine
    needs: tuple[MemoryTag, ...] = ()  # the memory without which it is refused
    changes_info: bool = False  # whether the engine's info or offer may differ afterwards, also after a failure
    lacking: str = ""  # what an engine lacks that does not list it, as a sentence without its end
    session: WeightsSession = WeightsSession.FREE
    answer_text: str = ""  # the whole HTTP answer when every engine has done it; empty: JSON by engine
    every_version: bool = False  # whether every version of the program has it, so that no engine need list it
    example: object = None  # an example of a body over HTTP
    saves: bool = False  # whether its result is a part of a file, which the command line asks for until it has all
    # The request by which several engines are asked whether they would carry it out, before any of them does.
    rehearsal: Callable[[Message], Message] | None = None
    # The request by which engines go back that have carried it out, if others have not.
    undo: Callable[[Message], Message] | None = None
    takes_file: bool = False  # whether its body over HTTP is a file, and the only field of its request has the bytes

    @property
    def request(self) -> type[Message]:
        """The class of its request."""
        return self.kind.message

    @property
    def result(self) -> type[Message]:
        """The class of its result."""
        assert self.kind.result is not None  # as `OPERATIONS` has it
        return self.kind.result

    @property
    def unlisted(self) -> str:
        """The refusal of an engine that does not list it."""
        return f"this engine does not carry out {self.name}{f': {self.lacking}' if self.lacking else ''}"

    @property
    def has_fields(self) -> bool:
        """Whether its request has fields, and so a body over HTTP."""
        return bool(attrs.fields(self.request))  # type: ignore[arg-type]  # every message is an attrs class

    def answered_within_s(self, request: Message) -> float:
        """Return the limit of an engine's answer to a request, with the wait for the ends of running ones."""
        return self.within_s + (request.within_s if isinstance(request, LeavingRequest) else 0.0)

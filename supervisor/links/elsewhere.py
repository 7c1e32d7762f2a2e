"""A result whose tensors are in the memory of the answering node, while this node reads them.

The stream has ended already: its number is free, and nothing else can come on it. So no reply can overtake the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from attrs import define, field

from actors.kit.calls import Answer
from protocol.errors import ActorLost, InternalError, RequestError
from protocol.messages.kind import Message
from supervisor.links.tensor_road import MemoryReader

log = logging.getLogger(__name__)


@define(eq=False)
class ResultElsewhere:
    """One result whose tensors are being read."""

    answer: Answer[Message, Message]
    result: Message
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    def fail(self, error: RequestError) -> None:
        """End the answer with an error, and stop reading."""
        self.answer.fail(error)
        self.scope.cancel(reason=error.detail)

    async def run(self, reader: MemoryReader, done: Callable[[], None]) -> None:
        """Read the tensors and end the answer; `done` is called in any case."""
        try:
            with self.scope:
                self.answer.end(await reader.read(self.result))
        except RequestError as error:
            self.answer.fail(error)
        except Exception:
            log.exception("a bug failed a %s", type(self.result).__name__)
            self.answer.fail(InternalError("the node made a mistake; its log has the details"))
        finally:
            self.answer.fail(ActorLost("the reading of the tensors has ended"))  # no effect if the answer has ended
            done()

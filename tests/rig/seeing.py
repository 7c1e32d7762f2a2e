"""A processor that takes images and answers with the number of those that it was sent, behind a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from attrs import Factory, define

from actors.kit.calls import Answer
from actors.processor import TextReply, TextRequest, TextResult
from protocol.messages.generation import FinishReason, Started, Usage
from protocol.messages.text import Accepted, Answered, ChoiceEnded, Respond, Text
from tests.rig.gateway import Rig

PNG = "data:image/png;base64,"
WEB = "https://media.example/cat.png"


@define(eq=False)
class SeeingProcessor:
    """A fake processor; each request waits until `going` is set."""

    asked: list[Respond] = Factory(list)
    going: trio.Event = Factory(trio.Event)
    bug: bool = False  # it fails, and its exception quotes the request

    @asynccontextmanager
    async def ask(self, request: TextRequest, credit: int) -> AsyncIterator[Answer[TextReply, TextResult]]:
        assert isinstance(request, Respond)
        self.asked.append(request)
        answer: Answer[TextReply, TextResult] = Answer(credit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer, request, answer)
            yield answer
            nursery.cancel_scope.cancel()

    async def _answer(self, request: Respond, answer: Answer[TextReply, TextResult]) -> None:
        await self.going.wait()
        if self.bug:
            raise RuntimeError(f"a bug with {request!r}")
        answer.put(Accepted(10 * len(request.media)), 0)
        answer.put(Started(0), 0)
        answer.put(Text(f"{len(request.media)} images", 1), 1)
        answer.put(ChoiceEnded(FinishReason.STOP), 0)
        answer.end(Answered(Usage(10 * len(request.media), 1, 0)))


def let_see(rig: Rig) -> SeeingProcessor:
    """Let the model of a gateway take images."""
    seeing = SeeingProcessor()
    seeing.going.set()
    served = rig.gateway.runner.served["tiny"]
    rig.gateway.runner.served = {"tiny": attrs.evolve(served, ask=seeing)}
    return seeing


def chat_parts(*urls: str) -> list[dict[str, object]]:
    """Return the content of a message of chat completions with images."""
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def response_parts(*urls: str) -> list[dict[str, object]]:
    """Return the content of an item of Responses with images."""
    return [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]

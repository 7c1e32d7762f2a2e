"""SGLang behind the engine port: a host at the other end of a link, and the requests that would kill it refused."""

from __future__ import annotations

from typing import Protocol, cast

import trio
from attrs import define, field

from actors._kit import Answer, Asks
from actors.engines.port import Generation
from protocol.errors import BadRequest, ContextTooLong
from protocol.messages import EngineInfo, EngineLoad, FlushCache, Generate, GetLoad, Message

KEPT = 6  # tokens; SGLang: `max_req_input_len`


class Line(Asks[Message, Message, Message], Protocol):
    """What this needs of the link to its host."""

    def open(self, request: Message, credit: int) -> tuple[int, Answer[Message, Message]]:
        """Ask without waiting: the stream's number and its answer."""

    def leave(self, stream: int) -> None:
        """Stop caring about a stream; idempotent."""

    async def wait_lost(self) -> None:
        """Wait until the link is lost."""


@define(eq=False)
class SglangEngine:
    """One SGLang engine; keeps the promises of `actors.engines.port.Engine`."""

    line: Line
    info: EngineInfo
    _streams: dict[str, tuple[int, Generation]] = field(factory=dict)

    def submit(self, request: Generate) -> Generation:
        """Start a request; raises `BadRequest` for one that would crash the engine, or be changed by it."""
        check(request, self.info)
        stream, answer = self.line.open(request, request.sampling.tokens_max)
        generation = cast("Generation", answer)  # the host answers a Generate with nothing else
        self._streams[request.id] = stream, generation
        return generation

    def abort(self, request_id: str) -> None:
        """Stop a request, whatever point it has reached."""
        if (running := self._streams.get(request_id)) is not None:
            self.line.leave(running[0])

    async def wait_released(self, request_id: str) -> None:
        """Wait until the host has closed the request's stream, which it does when the scheduler has let go."""
        await trio.lowlevel.checkpoint()
        if (running := self._streams.get(request_id)) is not None:
            await running[1].over.wait()
            self._streams.pop(request_id, None)

    async def wait_lost(self) -> None:
        """Wait for the end of the link, which is the end of the engine."""
        await self.line.wait_lost()

    async def load(self) -> EngineLoad:
        """Return the scheduler's own count."""
        load = await self._control(GetLoad())
        assert isinstance(load, EngineLoad)
        return load

    async def flush_cache(self) -> None:
        """Drop the prefix cache; raises `Overloaded` while requests run."""
        await self._control(FlushCache())

    async def _control(self, request: Message) -> Message | None:
        async with self.line.ask(request, 0) as answer:
            return await answer.result()


def check(request: Generate, info: EngineInfo) -> None:
    """Raise `BadRequest` for what SGLang would die of, and for what it would change without a word."""
    wanted = request.sampling
    if not request.tokens:
        raise BadRequest("the prompt is empty")
    if min(request.tokens) < 0 or max(request.tokens) >= info.vocabulary_size:
        raise BadRequest(f"the prompt has a token id outside 0 to {info.vocabulary_size - 1}")
    if any(not 0 <= token < info.vocabulary_size for token in wanted.stop_token_ids):
        raise BadRequest(f"a stop token id is outside 0 to {info.vocabulary_size - 1}", param="stop_token_ids")
    if wanted.tokens_max < 1:
        raise BadRequest("an answer has at least one token")
    total, most = len(request.tokens) + wanted.tokens_max, limit(info)
    if total > most:
        raise ContextTooLong(
            f"the prompt's {len(request.tokens)} tokens and the {wanted.tokens_max} asked for make {total};"
            f" this engine holds {most}"
        )


def limit(info: EngineInfo) -> int:
    """Return how many tokens of prompt and answer together one request may have.

    Of the KV memory SGLang keeps a page for itself, and it refuses prompts of the last `KEPT` tokens of either limit,
    however little is asked for; what passes the limits otherwise it would cut short without saying so.
    """
    return min(info.context_max - KEPT, info.kv_tokens_max - max(info.page_size, KEPT))

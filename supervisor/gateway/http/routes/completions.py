"""Chat completions and completions, streamed or not: two dialects, and the same steps in both."""

from __future__ import annotations

from functools import partial
from typing import Protocol, TypeVar

from protocol.dialects import chat, completions
from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.text_messages import Respond
from supervisor.gateway.http.exchange import Exchange
from supervisor.gateway.http.routes.answering import reply_streamed, reply_whole
from supervisor.gateway.http.routes.route import Handler

Asked = TypeVar("Asked", chat.ChatRequest, completions.CompletionRequest)


class Dialect(Protocol[Asked]):
    """The module `chat` or `completions`, as far as it is called here."""

    def parse(self, body: bytes) -> Asked:
        """Return the request that a client sent; raises the `RequestError` that lists its mistakes."""

    def to_respond(self, request: Asked, *, request_id: str) -> Respond:
        """Return the request for a processor."""

    def Chunks(self, request: Asked, *, request_id: str, created: int) -> ChoiceChunks:  # noqa: N802
        """Return what builds the events of a streamed answer; it is a class there, hence its name."""

    def Completion(self, request: Asked, *, request_id: str, created: int) -> AnswerBuilder:  # noqa: N802
        """Return what builds the body of an answer in one piece; it is a class there, too."""


async def _answer(dialect: Dialect[Asked], api: str, exchange: Exchange, body: bytes) -> None:
    """Answer one request; raises the `RequestError` that ended the answer before it began."""
    asked = await exchange.read(dialect.parse, body)
    ours, created = exchange.gateway.new_id(), int(exchange.gateway.now())
    counted = exchange.counted(asked.model, api)
    respond = dialect.to_respond(asked, request_id=ours)
    if asked.stream:
        chunks = dialect.Chunks(asked, request_id=ours, created=created)
        await reply_streamed(exchange, counted, respond, chunks)
    else:
        gathered = dialect.Completion(asked, request_id=ours, created=created)
        await reply_whole(exchange, counted, respond, gathered)


CHAT: Handler = partial(_answer, chat, "chat")
COMPLETIONS: Handler = partial(_answer, completions, "completions")

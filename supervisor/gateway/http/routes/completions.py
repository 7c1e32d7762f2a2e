"""Chat completions and completions: two dialects that are answered in the same steps."""

from __future__ import annotations

from functools import partial
from typing import Protocol, TypeVar

from protocol.dialects import chat, completions
from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.messages.text import Respond
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.routes.answering import reply_streamed, reply_whole
from supervisor.gateway.http.routes.route import Handler

Request = TypeVar("Request", chat.ChatRequest, completions.CompletionRequest)


class Dialect(Protocol[Request]):
    """The functions of the modules `chat` and `completions` that a route calls."""

    def parse(self, body: bytes) -> Request:
        """Return the client's request; raises one `RequestError` with all its mistakes."""

    def to_respond(self, request: Request, *, request_id: str) -> Respond:
        """Return the request for a processor."""

    def Chunks(self, request: Request, *, request_id: str, created: int) -> ChoiceChunks:  # noqa: N802
        """Return the builder of a streamed response; it is a class in the dialect, hence its name."""

    def Completion(self, request: Request, *, request_id: str, created: int) -> AnswerBuilder:  # noqa: N802
        """Return the builder of a response in one piece; it is a class in the dialect, too."""


async def _answer(dialect: Dialect[Request], api: str, exchange: Exchange, body: Body) -> None:
    """Answer one request; raises the `RequestError` by which it failed before its response began."""
    request = await exchange.read(dialect.parse, body)
    response_id, created = exchange.gateway.runtime.new_id(), int(exchange.gateway.runtime.now())
    record = exchange.start_record(request.model, api)
    respond = dialect.to_respond(request, request_id=response_id)
    if request.stream:
        chunks = dialect.Chunks(request, request_id=response_id, created=created)
        await reply_streamed(exchange, record, respond, chunks)
    else:
        builder = dialect.Completion(request, request_id=response_id, created=created)
        await reply_whole(exchange, record, respond, builder)


CHAT: Handler = partial(_answer, chat, "chat")
COMPLETIONS: Handler = partial(_answer, completions, "completions")

"""One HTTP request and its response, as a route's handler gets them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from attrs import define

from actors.kit.offload import Offload
from protocol.dialects.request_body import reading_work
from protocol.dialects.targets import NO_TARGETS, targets_of
from protocol.openapi.document import Operation
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.request import HttpRequest
from supervisor.gateway.http.response import HttpResponse
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.request_record import RequestRecord

T = TypeVar("T")


@define(eq=False)
class Body:
    """The body of a request, kept until it has been parsed: from then on its texts and images exist on their own."""

    data: bytes

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        data, self.data = self.data, b""
        return data


@define(eq=False)
class Exchange:
    """One HTTP request, its response, and what a handler does with both."""

    gateway: Gateway
    request: HttpRequest
    response: HttpResponse
    operations: tuple[Operation, ...] = ()  # of all routes of this server, for the OpenAPI document

    def set_key(self, key: ClientKey) -> None:
        """Set the caller's key, by which memory is reserved from now on."""
        self.request.key = key
        self.request.memory.owner = self.response.memory.owner = self.gateway.memory_owner(key)

    def start_record(self, model: str, api: str) -> RequestRecord:
        """Return the new record of a response by a model; raises `BadRequest` for wrong targets."""
        request = self.request
        self.response.record = record = RequestRecord(
            request.id,
            model,
            api,
            request.received_at,
            key=request.key,
            request_line=request.line,
            trace=request.trace,
            targets=NO_TARGETS if request.head is None else targets_of(request.head.values),
            settles=False,
        )
        return record

    async def read(self, parse: Callable[[bytes], T], body: Body) -> T:
        """Return the parsed body; raises the `RequestError` that lists its mistakes."""
        return await self.offload(reading_work(body.data), partial(parse, body.take()))

    async def offload(self, size: int, function: Callable[[], T]) -> T:
        """Return the result of `function`, run in a thread if `size` is large; keys take turns in using the threads."""
        return await Offload(self.gateway.runtime.run_in_thread, self.request.key.name).run(size, function)

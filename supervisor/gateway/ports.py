"""The ports of a gateway to its node, as three frozen values: the runtime, the probes and the administration.

A gateway imports neither the engines nor the cluster. All its questions about them are functions here. The assembly of
a node passes these functions in; a monitoring endpoint and a test pass others. Each value is complete before the
gateway is made, and is never changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import trio
from attrs import field, frozen

from actors.kit.offload import RunInThread, run_inline
from actors.kit.spans import Spans
from protocol.errors import NotFound, RequestError
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF
from protocol.trace import Trace, child_span
from supervisor.sockets.descriptor_reserve import DescriptorReserve

OperateEngines: TypeAlias = Callable[[Message, str | None], Awaitable[Mapping[str, Message | RequestError]]]
"""Have the engine of a name, or every engine, carry out an operation; the outcomes are by engine."""


def nothing_missing() -> str | None:
    """Return None: every kind of request can be served."""
    return None


@frozen(kw_only=True)
class GatewayRuntime:
    """The clock, the ids, the threads and the file descriptors of the node."""

    new_id: Callable[[], str]
    now: Callable[[], float]  # in seconds since 1970
    # Long texts are parsed in a thread: to parse one in the event loop would block all tokens.
    run_in_thread: RunInThread = run_inline
    # File descriptors that no connection may take.
    reserve: DescriptorReserve = field(factory=DescriptorReserve)
    spans: Spans = field(factory=Spans)

    def next_span(self, caller: Trace | None) -> Trace:
        """Return the span of a request: the next one of its client's trace, or the first of a new trace."""
        drawn = self.new_id()
        return self.spans.root(drawn) if caller is None else child_span(caller, drawn)


@frozen(kw_only=True)
class Probes:
    """The questions of monitors: readiness and metrics."""

    unready: Callable[[], str | None]  # why it cannot serve now, None if it can
    metrics_text: Callable[[], Awaitable[bytes]]
    missing: Callable[[], str | None] = nothing_missing  # what some requests need; all others can be served
    wait_ready: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint  # until requests are admitted


@frozen(kw_only=True)
class Administration:
    """The questions of operators about a server, and their operations on its engines."""

    server_info: Callable[[], dict[str, object]]
    pools: Callable[[], dict[str, object]]
    operate: OperateEngines


def _no_server_info() -> dict[str, object]:
    raise NotFound("this server gives no information about itself")


def _no_pools() -> dict[str, object]:
    return {"pools": [], "grids": []}


async def _no_engines(request: Message, _: str | None) -> Mapping[str, Message | RequestError]:
    await trio.lowlevel.checkpoint()
    raise NotFound(f"there is no engine here that could carry out {OPERATION_OF[type(request)].name}")


NO_ADMINISTRATION = Administration(server_info=_no_server_info, pools=_no_pools, operate=_no_engines)
"""The administration of a server without engines, such as a monitoring endpoint."""

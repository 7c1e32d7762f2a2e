"""The parts of a request that are Trio's, and calls between actors: tasks, scopes, switches."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from actors.kit.calls import Address, BugCounter, Call, Inbox, mailbox
from bench.stages.measure import AnyStage, AsyncOnce, Stage, TaskStage
from protocol.messages import Done, FlushCache
from supervisor.gateway.admission import AdmissionGate

INBOX = 16


async def _nothing(_: trio.Nursery) -> AsyncOnce:
    async def once() -> None:
        pass

    return once


async def _checkpoint(_: trio.Nursery) -> AsyncOnce:
    return trio.lowlevel.checkpoint


async def _scope(_: trio.Nursery) -> AsyncOnce:
    async def once() -> None:
        with trio.move_on_after(60):  # noqa: ASYNC100  # the scope alone is measured
            pass

    return once


async def _task(_: trio.Nursery) -> AsyncOnce:
    async def nothing() -> None:
        pass

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nothing)

    return once


async def _channel(nursery: trio.Nursery) -> AsyncOnce:
    there, asked = trio.open_memory_channel[int](1)
    back, answered = trio.open_memory_channel[int](1)

    async def echo() -> None:
        async for number in asked:
            await back.send(number)

    nursery.start_soon(echo)
    await wait_all_tasks_blocked()

    async def once() -> int:
        await there.send(1)
        return await answered.receive()

    return once


async def _admission(_: trio.Nursery) -> AsyncOnce:
    gate = AdmissionGate(requests_max=64, admit_s=10.0, waiting_max=64, unready=lambda: None)

    async def once() -> int:
        async with gate.admitted(owner="alice"):
            return gate.inside

    return once


async def _call(nursery: trio.Nursery) -> AsyncOnce:
    address: Address[FlushCache, Done, Done]
    address, inbox = mailbox(INBOX)
    nursery.start_soon(_actor, inbox)
    request = FlushCache()
    await wait_all_tasks_blocked()

    async def once() -> Done | None:
        async with address.ask(request, 0) as answer:
            return await answer.result()

    return once


async def _actor(inbox: Inbox[Call[FlushCache, Done, Done]]) -> None:
    """Answer each call in a task of its own, as actors do."""
    bugs = BugCounter()

    async def serve(call: Call[FlushCache, Done, Done]) -> None:
        with call.answering(bugs) as answer:
            answer.end(Done())

    async with trio.open_nursery() as requests:
        while True:
            requests.start_soon(serve, await inbox.receive())


def task_stages() -> tuple[AnyStage, ...]:
    """Return the stages; the first two are what measuring itself costs, which is in all others."""
    return (
        Stage("nothing: the loop of this bench", "request", lambda: lambda: None),
        TaskStage("nothing, awaited", "request", _nothing),
        TaskStage("a checkpoint: a switch to no other task", "request", _checkpoint),
        TaskStage("a scope with a deadline", "request", _scope),
        TaskStage("a nursery with one task", "request", _task),
        TaskStage("over a memory channel to a task and back", "request", _channel),
        TaskStage("admission without a wait", "request", _admission),
        TaskStage("a call of an actor that answers at once", "request", _call),
    )

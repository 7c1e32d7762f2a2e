"""The commands `drain` and `restart`: a node finishes its requests and exits; its launcher may start it again.

The processes of a gateway's node are drained together, and restarted one after the other, so that the running ones take
the clients of the stopped one.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio
from rich.console import Console

from protocol.errors import EspalierError, PeerLost
from protocol.messages.cluster import Drain, GetStatus, Status
from supervisor.cli import status_view
from supervisor.cli.client import FAST_POLL_S, ClusterClient, NodeRoute, has_link_to, nothing_listens
from supervisor.cli.output import print_sentence
from supervisor.cli.status_view import StatusOrError
from supervisor.supervision.status import READY

RESTART_WAIT_S = 600.0  # the longest start of a node with engines


async def drain_nodes(client: ClusterClient, console: Console, name: str) -> int:
    """Ask a node to drain, or all processes of a gateway's node; wait until all have gone; return the exit code.

    Raises the error of a single node; the errors of several processes are printed, and all are waited for.
    """
    processes, statuses = client.cluster.processes.get(name, (name,)), await client.poll()
    if len(processes) == 1:
        return await drain_node(client, console, processes[0], statuses)
    codes = list[int]()

    async def drain_one(process: str) -> None:
        try:
            codes.append(await drain_node(client, console, process, statuses))
        except EspalierError as error:
            print_sentence(console, f"{process}: {error}")
            codes.append(1)

    async with trio.open_nursery() as nursery:
        for process in processes:
            nursery.start_soon(drain_one, process)
    return max(codes)


async def restart_nodes(client: ClusterClient, console: Console, name: str) -> int:
    """Restart a node, or the processes of a gateway's node one after the other, and return the exit code.

    Stops at the first process that does not come up again.
    """
    for process in client.cluster.processes.get(name, (name,)):
        statuses = await client.poll()
        if code := await drain_node(client, console, process, statuses, restarts=True):
            return code
        if not await _comes_up(client, process, _linked(statuses[process])):
            print_sentence(console, f"Node {process} is not up after {RESTART_WAIT_S:g} s: see its log.")
            return 1
        print_sentence(console, f"Node {process} is up.")
    return 0


async def _comes_up(client: ClusterClient, name: str, linked: set[str]) -> bool:
    """Whether a restarted node is up in time, with links to its former peers.

    A peer that has gone meanwhile, or drains, is not waited for: that link may never return.
    """
    with trio.move_on_after(RESTART_WAIT_S):
        while True:
            statuses = await client.poll()
            status = statuses.get(name, "")
            stayed = {other for other in linked if _stays(statuses.get(other, ""))}
            if _is_up(status) and stayed <= _linked(status):
                return True
            await trio.sleep(FAST_POLL_S)
    return False


def _linked(status: StatusOrError) -> set[str]:
    """Return the nodes at the other ends of a node's links."""
    return {link.node for link in status.links if link.up} if isinstance(status, Status) else set()


def _stays(status: StatusOrError) -> bool:
    """Whether a node has answered, and does not drain."""
    return isinstance(status, Status) and not status.state.draining


def _has_gateway(statuses: Mapping[str, StatusOrError], besides: str) -> bool:
    """Whether another gateway admits requests and does not drain."""
    others = [status for name, status in statuses.items() if name != besides and isinstance(status, Status)]
    return any(_stays(status) and status.gate is not None and not status.gate.unready for status in others)


def _is_up(status: StatusOrError) -> bool:
    """Whether a node has answered, all of its tree is up, and its gateway, if it has one, admits requests."""
    if not isinstance(status, Status) or not _stays(status):
        return False
    return all(child.state == READY for child in status.tree) and not (status.gate and status.gate.unready)


async def drain_node(
    client: ClusterClient,
    console: Console,
    name: str,
    statuses: Mapping[str, StatusOrError],
    *,
    restarts: bool = False,
) -> int:
    """Ask a node with one of these statuses to drain, wait until it has gone, and return the exit code."""
    before = statuses.get(name)
    if name not in statuses:
        print_sentence(console, f"There is no node {name}; there is {', '.join(statuses)}.")
        return 1
    if not isinstance(before, Status):
        print_sentence(
            console,
            f"Node {name} cannot be asked: {before}. If it runs, end it by SIGTERM on its host, which drains it too.",
        )
        return 1
    route = client.routes[name]
    await client.ask(name, Drain(name, restarts))
    print_sentence(console, f"Node {name} drains: it gets nothing new, and its streams finish or move to other nodes.")
    # Asked only now: another command may have drained the other gateways at the same time.
    if before.gate is not None and not _has_gateway(await client.poll(), besides=name):
        print_sentence(console, "No other gateway serves: clients are refused until one is up.")
    printed = -1
    while True:
        await trio.sleep(FAST_POLL_S)
        status = await _poll_node(client, name, route)
        if status is None:
            print_sentence(console, f"Node {name} has gone.")
            return 0
        if status.run != before.run:
            print_sentence(console, f"Node {name} has gone, and runs again.")
            return 0
        running = status_view.running_requests(status)
        if running != printed:
            print_sentence(console, f"  {running} request{'s run' if running != 1 else ' runs'} on {name}")
            printed = running


async def _poll_node(client: ClusterClient, name: str, route: NodeRoute) -> Status | None:
    """Return the status of a node that has answered at a route, None once it is gone.

    It is gone when nothing listens at its address any more, or no answering node has a link to it. Raises `PeerLost` if
    no node answers at all.
    """
    direct = route == client.route(name)
    while True:
        client.routes.setdefault(name, route)  # a poll without the node's answer has removed its route
        try:
            status = await client.ask(name, GetStatus(name))
            return status if isinstance(status, Status) else None
        except EspalierError as error:
            cause = error
        if direct and nothing_listens(cause):  # the machine is there, and the node is not
            return None
        if not direct:
            statuses = await client.poll()
            if isinstance(found := statuses.get(name), Status):
                return found
            if not any(isinstance(status, Status) for status in statuses.values()):
                raise PeerLost(f"no node answers any more, so it is not known whether {name} has gone") from cause
            if not any(has_link_to(status, name) for status in statuses.values()):
                return None
        await trio.sleep(FAST_POLL_S)


COMMANDS = {"drain": drain_nodes, "restart": restart_nodes}

"""What an operator does from a shell: look at a running cluster, drain a node of it, have its file read anew.

An operator greets a node as another node would, with the cluster's secret, but under a name that no node may have. A
node that does not listen, or that cannot be reached from here, is asked through one that has a link to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from math import isfinite
from pathlib import Path

import msgspec
import trio
from attrs import define, field
from rich.console import Console
from rich.live import Live

from protocol.cluster import OPERATOR, Drain, GetStatus, Reload, Reloaded, Status
from protocol.cluster import check as check_state
from protocol.codec import Message
from protocol.errors import (
    ActorError,
    DeadlineExceeded,
    EspalierError,
    PeerLost,
    PeerViolation,
    RequestError,
    StartFailed,
)
from protocol.greeting import Greeter
from protocol.peer import Peer
from supervisor import board, check, config, wires
from supervisor.board import Seen
from supervisor.config import Cluster
from supervisor.crossing import plain
from supervisor.link import Heart, Link
from supervisor.links import Tls

ANSWERS_S = 5.0
PASSED_ON_S = 15.0  # for all nodes that are asked through others
LOOKS_S = 1.0  # between two looks
DRAINS_S = 0.25  # the same, at a node that drains or starts
STARTS_S = 20.0  # for a node that its launcher starts to answer
NAME_BYTES = 4


@define(eq=False)
class Operator:
    """Asks the nodes of one cluster; `routes` says where each of those that were seen is asked."""

    cluster: Cluster
    secret: bytes = field(repr=False)
    tls: Tls | None
    new_nonce: Callable[[], bytes]
    routes: dict[str, wires.At] = field(factory=dict)

    async def look(self) -> dict[str, Seen]:
        """Return how every node of the cluster is, also of one that has joined, or why that cannot be known."""
        listens = {name: at for name in self.cluster.node if (at := self.at(name)) is not None}
        seen: dict[str, Seen] = dict.fromkeys(
            self.cluster.node, "it does not listen, and no node that answers has a link to it"
        )
        self.routes.clear()
        async with trio.open_nursery() as nursery:
            for name, at in listens.items():
                nursery.start_soon(self._see, name, at, seen)
        reached = dict(self.routes)
        others = {other.name for each in seen.values() if isinstance(each, Status) for other in each.state.neighbours}
        with trio.move_on_after(PASSED_ON_S):  # a node may tell of many that do not answer, and lie
            for name in (*seen, *sorted(others - seen.keys())):
                for through, at in reached.items():
                    if name not in self.routes and _linked(seen[through], name):
                        await self._see(name, at, seen)
        return seen

    async def ask(self, name: str, request: Message) -> Message:
        """Ask by the way on which the node was seen; raises `PeerLost`, `PeerRefused` or what it answers with."""
        return await self._asked(self.routes[name], request)

    async def _see(self, name: str, at: wires.At, seen: dict[str, Seen]) -> None:
        try:
            status = _checked(await self._asked(at, GetStatus(name)))
        except EspalierError as error:
            seen[name] = f"nobody listens at {at}" if _refused(error) else str(error)
            return
        if isinstance(status, Status):
            seen[name] = status
            self.routes[name] = at

    async def _asked(self, at: wires.At, request: Message) -> Message:
        section, answers = self.cluster.cluster, list[Message | None]()
        name = f"{OPERATOR}{self.new_nonce()[:NAME_BYTES].hex()}"

        async def talk(wire: wires.Wire) -> None:
            greeter = Greeter("dials", section.name, name, self.secret, self.new_nonce())
            await wires.greet(wire, greeter, section.greet_s)
            link = Link(wire, Peer(name, serves_max=0), lost_as=_Lost, heart=Heart(section.beat_s, section.silent_s))
            answers.append(await _answer(link, request))

        await wires.dial(at, self.tls.dials if self.tls else None, section.greet_s, talk)
        if not answers or answers[0] is None:
            raise PeerLost(f"{at} ended the link before it answered")
        return answers[0]

    def at(self, name: str) -> wires.At | None:
        """Return where a node listens, None if it does not, or is not in the file."""
        node = self.cluster.node.get(name)
        return None if node is None or node.dialed_at is None else wires.At.read(node.dialed_at)


class _Lost(RequestError):
    """The link to a node went down while an operator waited."""


async def _answer(link: Link, request: Message) -> Message | None:
    """Return the answer to one question over a link that is carried for it alone."""
    result: Message | None = None
    failure: EspalierError | None = None

    async def carry() -> None:
        nonlocal failure
        try:
            await link.run()
        except ActorError as error:
            failure = error
        asking.cancel(reason="the link is lost")

    async with trio.open_nursery() as nursery:
        asking = trio.CancelScope()
        nursery.start_soon(carry)
        try:
            with asking, trio.fail_after(ANSWERS_S):
                await link.wait_ready()
                async with link.ask(request, 0) as answer:
                    result = await answer.result()
        except trio.TooSlowError:
            failure = DeadlineExceeded(f"it did not answer within {ANSWERS_S:g} s")
        except RequestError as error:
            if not isinstance(error, _Lost):
                failure = error
        nursery.cancel_scope.cancel(reason="it has answered, or will not")
    if result is None and failure is not None:
        raise failure
    return result


def _refused(error: BaseException | None) -> bool:
    """Whether nobody listens there, which is more than that nobody could be reached."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_refused, error.exceptions))
    return error is not None and (isinstance(error, ConnectionRefusedError) or _refused(error.__cause__))


def _checked(status: Message) -> Message:
    """Return what a node says if it can be true, else raise `PeerViolation`."""
    if isinstance(status, Status):
        check_state(status.state)
        times = (status.up_s, *(child.since_s for child in status.tree), *(link.silent_s for link in status.links))
        if not all(map(isfinite, times)):
            raise PeerViolation("it tells times that cannot be")
    return status


def _linked(seen: Seen, name: str) -> bool:
    return isinstance(seen, Status) and any(link.node == name and link.up for link in seen.links)


# Commands ------------------------------------------------------------------------------


def main(arguments: list[str], environment: Mapping[str, str], new_nonce: Callable[[], bytes]) -> int:
    """Do what the command line says, and return the exit code; raises `StartFailed` if the file is of no use."""
    parser = argparse.ArgumentParser(
        prog="python -m supervisor", description="Look at a running cluster, or change it."
    )
    parser.add_argument("file", type=Path, help="its cluster.toml")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="every node's tree, engines and links")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    drain = commands.add_parser("drain", help="let a node finish what runs, and end; waits until it has gone")
    drain.add_argument("node")
    commands.add_parser("reload", help="let every node read its file anew")
    given = parser.parse_args(arguments)
    cluster = config.read(given.file)
    listening = [name for name, node in cluster.node.items() if node.listen is not None]
    if not listening:
        raise StartFailed(
            'no node of this cluster listens, so none can be asked: give one listen = "127.0.0.1:7401" in its table.'
            " Until then, SIGHUP makes a node read its file anew, and SIGTERM drains it"
        )
    secret = check.secret(cluster, environment)
    operator = Operator(cluster, secret, check.link_tls(cluster), new_nonce)
    console = Console(highlight=False, soft_wrap=False)
    run: Callable[[], Awaitable[int]]
    match given.command:
        case "status":
            run = partial(_status, operator, console, as_json=given.json, watch=given.watch)
        case "drain":
            run = partial(_drain, operator, console, given.node)
        case _:
            run = partial(_reload, operator, console)
    try:
        return trio.run(run, strict_exception_groups=True)
    except KeyboardInterrupt:
        return 130


async def _status(operator: Operator, console: Console, *, as_json: bool, watch: bool) -> int:
    name = operator.cluster.cluster.name
    if as_json:
        while True:
            seen = await operator.look()
            sys.stdout.write(json.dumps(as_data(name, seen)) + "\n")
            sys.stdout.flush()
            if not watch:
                return _whole(seen)
            await trio.sleep(LOOKS_S)
    seen = await operator.look()
    if not watch:
        console.print(board.board(name, seen))
        return _whole(seen)
    with Live(board.board(name, seen), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await trio.sleep(LOOKS_S)
            live.update(board.board(name, await operator.look()), refresh=True)


def as_data(name: str, seen: Mapping[str, Seen]) -> dict[str, object]:
    """Return what was seen of a cluster as plain values, for JSON."""
    nodes = {
        node: {"unreachable": each} if isinstance(each, str) else msgspec.to_builtins(each)
        for node, each in seen.items()
    }
    return {"cluster": name, "nodes": nodes}


def _whole(seen: Mapping[str, Seen]) -> int:
    """Return 0 if every node has answered, else 1."""
    return int(any(isinstance(each, str) for each in seen.values()))


async def _drain(operator: Operator, console: Console, name: str) -> int:
    seen = await operator.look()
    before = seen.get(name)
    if name not in seen:
        _say(console, f"There is no node {name}; there is {', '.join(seen)}.")
        return 1
    if not isinstance(before, Status):
        _say(
            console,
            f"Node {name} cannot be asked: {before}. If it runs, end it by SIGTERM on its host, which drains it too.",
        )
        return 1
    await operator.ask(name, Drain(name))
    _say(console, f"Node {name} drains: it gets nothing new, and its streams finish or move to other nodes.")
    said = -1
    while True:
        await trio.sleep(DRAINS_S)
        status = await _look_at(operator, name)
        if status is None:
            _say(console, f"Node {name} has gone.")
            return 0
        if status.run != before.run:
            _say(console, f"Node {name} has gone, and runs again.")
            return 0
        running = sum(offer.running + offer.waiting for offer in status.state.offers)
        if running != said:
            _say(console, f"  {running} request{'s run' if running != 1 else ' runs'} on it")
            said = running


async def _look_at(operator: Operator, name: str) -> Status | None:
    """Return how a node is that has been seen before, None once it has gone: nobody is there, or no link to it.

    Raises `PeerLost` if nobody is left who could say so.
    """
    through = operator.routes[name]
    direct = through == operator.at(name)
    while True:
        operator.routes.setdefault(name, through)  # a look that did not see it has lost the way
        try:
            status = await operator.ask(name, GetStatus(name))
            return status if isinstance(status, Status) else None
        except EspalierError as error:
            why = error
        if direct and _refused(why):  # the host is there, and the node is not
            return None
        if not direct:
            seen = await operator.look()
            if isinstance(found := seen.get(name), Status):
                return found
            if not operator.routes:
                raise PeerLost(f"no node answers any more, so nobody knows whether {name} has gone") from why
            if not any(_linked(each, name) for each in seen.values()):
                return None
        await trio.sleep(DRAINS_S)


async def _reload(operator: Operator, console: Console) -> int:
    seen: Mapping[str, Seen] = await operator.look()
    code, starts = 0, set[str]()
    for name in [name for name, each in seen.items() if isinstance(each, Status)]:
        try:
            reloaded = await operator.ask(name, Reload(name))
        except EspalierError as error:
            _say(console, f"{name}: {error}")
            code = 1
            continue
        if isinstance(reloaded, Reloaded):
            console.print(board.reloaded(name, reloaded), soft_wrap=True)
            starts.update(reloaded.starts)
    missing = [name for name, each in seen.items() if isinstance(each, str)]
    seen = await _wait_for(operator, seen, starts.intersection(missing))
    for name in missing:
        each = seen.get(name, "it has left the cluster")
        if isinstance(each, Status):
            _say(console, f"{name}: it runs now")
        else:
            _say(console, f"{name}: not asked: {each}")
            code = 1
    return code


async def _wait_for(operator: Operator, seen: Mapping[str, Seen], starts: Collection[str]) -> Mapping[str, Seen]:
    """Return how the nodes are once those that start answer, or have not for too long."""
    with trio.move_on_after(STARTS_S):
        while any(isinstance(seen.get(name), str) for name in starts):
            await trio.sleep(DRAINS_S)
            seen = await operator.look()
    return seen


def _say(console: Console, text: str) -> None:
    """Print a sentence in which others may have had a say."""
    console.print(plain(text), markup=False, emoji=False, soft_wrap=True)

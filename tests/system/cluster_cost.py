"""The cost of a cluster: bytes and CPU a node and second, CPU a routing decision, at 10, 100 and 1,000 nodes.

It is measured while nothing happens, while the loads of all workers change, and while all of them publish the blocks of
their prefix caches.

Real links, directories and announcements in one process, in virtual time, over a network in memory: WebSockets, TLS and the
kernel are not in it. CPU is measured for all nodes together, and for the gateway's alone: each turn of its tasks, which
read frames, record loads, rank workers and announce, by the thread's own clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import trio
from attrs import define, field
from trio.testing import MockClock

from actors.engines.port import Engine
from actors.kit.priority_inbox import priority_inbox
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.cluster import Leg, Offer
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from supervisor.cluster import models, readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.work import RequestInbox
from supervisor.links.endpoint import Endpoint
from supervisor.supervision.registration import Registration
from tests.system.cluster_blocks import BlockWorker, check_index, publish, subscriber, wait_known
from tests.system.simulator.node_network import NodeNetwork

MODEL, SLOTS, FRONT = "oak", 8, "front"
CHANGES = 10  # of a worker's load a second, while it is busy
PUBLISHING = "publishing blocks"
LASTS_S = 10.0  # of each measurement, in virtual time
NETWORK = {"delay_s": 0.0, "piece_max": 65536, "room": 1 << 20}


@define(eq=False)
class _Links(Mesh):
    net: NodeNetwork = field(kw_only=True)
    blocks: BlockWorker | None = None

    async def _listen(self, nursery: trio.Nursery, listen: Endpoint) -> None:
        def accept(stream: trio.SocketStream) -> None:
            nursery.start_soon(self._accepted, stream)

        self.directory.address = str(listen)
        self.net.listening[str(listen)] = self.name, accept


class Steps(trio.abc.Instrument):
    """Counts the turns of one task and of all below it, and the CPU seconds that they took."""

    def __init__(self) -> None:
        self.number = 0
        self.spent_s = 0.0
        self._below: set[trio.lowlevel.Task] = set()
        self._began = 0.0

    async def run(self, job: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None]) -> None:
        """Run what is to be measured."""
        self._below.add(trio.lowlevel.current_task())
        await job(task_status=task_status)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """Count a task whose nursery is one of ours."""
        if task.parent_nursery is not None and task.parent_nursery.parent_task in self._below:
            self._below.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Forget a task."""
        self._below.discard(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Look at the clock."""
        if task in self._below:
            self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Look at it again."""
        if task in self._below:
            self.number += 1
            self.spent_s += time.thread_time() - self._began


def node(net: NodeNetwork, name: str, stack: ExitStack) -> _Links:
    """Return a node's links; but for the gateway's it has one worker."""
    routes, blocks = name == FRONT, None
    directory = Directory(name, routes=routes, required_peers=frozenset({FRONT} - {name}))
    if not routes:
        inbox: RequestInbox
        address, inbox = priority_inbox(64, lambda _: 0)
        offer = Offer(f"{MODEL}-{name}", MODEL, Leg.BOTH, SLOTS, up=False)
        registration: Registration[Engine] = Registration(directory.notify)
        directory.local[offer.name] = LocalWorker(
            node=name,
            idle_offer=offer,
            address=address,
            engine=registration,
            inbox=inbox,
            directory=directory,
        )
        blocks = BlockWorker.of(offer.name, INFO, registration)
        stack.enter_context(registration.publish(cast("Engine", blocks.engine)))
        directory.configure(FRONT, f"{FRONT}:7400")
    numbers = count()
    return _Links(
        name=name,
        section=LinkSettings(),
        directory=directory,
        services={} if blocks is None else blocks.services,
        listen=Endpoint(name, 7400),
        secret=b"x" * 32,
        tls=None,
        new_nonce=lambda: f"{name} {next(numbers)}".encode().ljust(32),
        chance=random.Random(name),
        dial=partial(net.dial, name),
        accept=net.accepted,
        net=net,
        blocks=blocks,
    )


INFO = EngineInfo("simulated", "1", 1000, 4096, 65536, 4096, SLOTS, 16, honours_seed=True)


async def measured(many: int) -> dict[str, float]:
    """Return the costs of a cluster of so many workers."""
    net, found = NodeNetwork(random.Random(1), NETWORK), dict[str, float]()
    with ExitStack() as stack:
        names = [FRONT, *(f"w{number:04d}" for number in range(many))]
        nodes = [node(net, name, stack) for name in names]
        front, workers = nodes[0], nodes[1:]
        for name in names[1:]:
            front.directory.configure(name, f"{name}:7400")
        async with trio.open_nursery() as nursery:
            steps = Steps()
            trio.lowlevel.add_instrument(steps)
            await nursery.start(partial(steps.run, front.run))
            for each in workers:
                await nursery.start(each.run)
            with trio.fail_after(600):
                while len(front.directory.workers(MODEL)) < many:  # noqa: ASYNC110  # of many nodes
                    await trio.sleep(1)
            await trio.sleep(10)
            gc.collect()
            gc.freeze()  # what all other nodes hold is not the gateway's to look through
            heres = [here for node in workers for here in node.directory.local.values()]
            found["links of a worker"] = sum(len(node.statistics().dialers) for node in workers) / many
            for what, asker in (("idle", ""), ("asked by the gateway", FRONT), ("asked by others", None)):
                with _period(what, nodes, steps, found):
                    await _change_loads(heres, asker)
            _routing(front.directory, found)
            await _publish(nodes, steps, found, nursery)
            trio.lowlevel.remove_instrument(steps)
            gc.unfreeze()
            nursery.cancel_scope.cancel()
    return found


@contextmanager
def _period(what: str, nodes: Sequence[Mesh], steps: Steps, found: dict[str, float]) -> Iterator[None]:
    """Measure what happens within it, for `LASTS_S` seconds."""
    front, workers = nodes[0], nodes[1:]
    before, began = _bytes(front), time.process_time()
    own = sum(map(_bytes, workers))
    front.directory.ranked(MODEL, Leg.BOTH)  # as a router has it, to be kept in order from now on
    number, gateway_s = steps.number, steps.spent_s
    yield
    spent_s = time.process_time() - began
    found |= {
        f"{what}: bytes a second of the gateway": (_bytes(front) - before) / LASTS_S,
        f"{what}: bytes a second of a worker": (sum(map(_bytes, workers)) - own) / LASTS_S / len(workers),
        f"{what}: CPU of all, share of a core": spent_s / LASTS_S,
        f"{what}: CPU of the gateway, share of a core": (steps.spent_s - gateway_s) / LASTS_S,
        f"{what}: turns of the gateway a second": (steps.number - number) / LASTS_S,
    }


async def _change_loads(heres: list[LocalWorker], asker: str | None) -> None:
    """Change the load of every worker again and again, as requests of a node would; with "" let nothing happen."""
    for turn in range(int(LASTS_S * CHANGES)):
        if asker != "":
            for here in heres:
                if turn % 2:
                    here.in_flight.remove(asker, "a", tokens=100)
                else:
                    here.in_flight.add(asker, "a", prompt_tokens=0, tokens=100)
                here.directory.load_changed(here, asker)
        await trio.sleep(1 / CHANGES)


async def _publish(nodes: Sequence[_Links], steps: Steps, found: dict[str, float], nursery: trio.Nursery) -> None:
    """Measure what it costs that the gateway follows the blocks of all workers."""
    workers = [node.blocks for node in nodes if node.blocks is not None]
    for worker in workers:
        await worker.start(nursery)
    listening = subscriber(nodes[0].directory, MODEL)
    await nursery.start(partial(steps.run, listening.run))
    await wait_known(listening.index, len(workers))
    gc.collect()
    gc.freeze()
    with _period(PUBLISHING, nodes, steps, found):
        await publish(workers, int(LASTS_S))
    check_index(listening.index, workers)
    changed_s = sum(worker.engine.changed for worker in workers) / LASTS_S
    found |= {
        f"{PUBLISHING}: blocks stored or removed a second": changed_s,
        f"{PUBLISHING}: bytes a block": found[f"{PUBLISHING}: bytes a second of the gateway"] / changed_s,
        f"{PUBLISHING}: CPU of the gateway a block, us": 1e6
        * found[f"{PUBLISHING}: CPU of the gateway, share of a core"]
        / changed_s,
    }


def _bytes(links: Mesh) -> int:
    live = (node.link.traffic for node in links.directory.nodes.values() if node.link is not None)
    return sum(link.bytes_sent + link.bytes_received for link in live)


def _routing(directory: Directory, found: dict[str, float]) -> None:
    numbers = count(1)
    routing = Routing(
        ModelPool(directory, MODEL), least_loaded, FailoverLimits(), partial(next, numbers), str, 0, frozenset()
    )
    routing.ranked = partial(directory.ranked, MODEL)
    request = Generate("", TokenIds.of([1] * 100), Sampling(100))
    rounds, began = 200, time.process_time()
    for _ in range(rounds):
        assert readiness.never_ready(directory, (MODEL,)) is None
        assert models.request_limits(directory, MODEL, 4096) is not None
        models.request_tokens_max(directory, MODEL)
        route = routing.choose(request)
        assert route is not None
        route.end()
    found["a routing decision, ms"] = 1000 * (time.process_time() - began) / rounds


def main() -> None:
    """Print a table of what each size costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--json", type=Path)
    options, results = parser.parse_args(), []
    for many in options.sizes:
        began = time.process_time()
        found = trio.run(measured, many, clock=MockClock(autojump_threshold=0))
        sys.stdout.write(f"{many} workers ({time.process_time() - began:.0f} s of CPU)\n")
        for what, figure in found.items():
            sys.stdout.write(f"  {what:50} {figure:12.3f}\n")
        results.append({"workers": many, "figures": found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

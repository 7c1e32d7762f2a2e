"""The workers of a node, offered as `supervisor.node.assembly` offers them."""

from __future__ import annotations

from functools import partial

import trio

from actors.decode import decode
from actors.kit.priority_inbox import priority_inbox
from actors.prefill import prefill
from protocol.cost import generation_tokens
from protocol.messages.cluster import Leg, Offer
from protocol.messages.generation import Generate
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.work import RequestInbox
from supervisor.links.serving import under_name
from supervisor.supervision.registration import Registration
from tests.rig.engine_lives import carrying_out
from tests.rig.fake_engine import Costs
from tests.rig.small_system import SmallSystem


def urgency(request: Generate) -> int:
    return request.priority


def owner(request: Generate) -> str:
    return request.owner


def offer_of(name: str, leg: Leg, costs: Costs) -> Offer:
    """Return what `supervisor.engines.children` offers of such an engine."""
    most = 0 if leg is Leg.DECODE else costs.pending_prefill_max
    return Offer(name, "tiny", leg, costs.slots, up=False, pending_prefill_tokens_max=most)


def register_workers(system: SmallSystem, directory: Directory) -> list[RequestInbox]:
    """Offer the workers of a node in its directory, as `supervisor.node.assembly` does, and return their inboxes."""
    inboxes: list[RequestInbox] = []
    system.engines = [Registration() for _ in range(system.workers)]
    for number, each in enumerate(system.engines):
        costs = system.costs_of(number)
        offer = offer_of(f"{directory.name}-{number}", costs.leg, costs)
        inbox: RequestInbox
        address, inbox = priority_inbox(max(1, system.inbox_size), urgency, owner, generation_tokens)
        inboxes.append(inbox)
        worker = directory.local[offer.name] = LocalWorker(
            node=directory.name,
            idle_offer=offer,
            address=address,
            engine=each,
            inbox=inbox,
            directory=directory,
            services=under_name(str(number), system.services_of(number)),
        )
        each.on_change = partial(_changed, system, directory, number, worker)
    return inboxes


def _changed(system: SmallSystem, directory: Directory, number: int, worker: LocalWorker) -> None:
    """Do what `supervisor.engines.children` does when an engine comes, goes, or changes its service."""
    directory.notify()
    worker.inbox.recheck()
    if not worker.engine.in_service:
        system.cancel_probe(number)
        worker.reroute_queued()


async def work(
    system: SmallSystem,
    directory: Directory,
    inboxes: list[RequestInbox],
    number: int,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Do what `supervisor.engines.children` does for one worker, until its engine is lost."""
    engine = await system.engines[number].wait()
    directory.reroute_queued()
    try:
        costs = system.costs_of(number)
        leg = costs.leg
        slots = system.new_slots(number, engine, costs)
        own = inboxes[number], [slots]
        with system.slots[number].publish(slots):
            async with carrying_out(engine, system.engines[number], slots, system.lives[number]):
                if leg is Leg.PREFILL:
                    await prefill(*own, task_status=task_status)
                else:
                    most = costs.pending_prefill_max if leg is Leg.BOTH else 0
                    await decode(*own, most, task_status=task_status)
    finally:
        list(directory.local.values())[number].reroute_queued()

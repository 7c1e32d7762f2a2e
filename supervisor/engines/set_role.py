"""The operation `set-role` of an engine of this node: what it refuses, and the wait for the new life."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from protocol.errors import BadRequest, NotReady, StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF
from protocol.messages.role import SetRole
from protocol.strict.mistakes import join, segment
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.operations import operate_in_tree
from supervisor.config.checks import cross_checks
from supervisor.config.schema import EngineSection
from supervisor.engines.engine_role import EngineRole, with_leg
from supervisor.engines.kind import NodeContext
from supervisor.engines.kinds import KINDS
from supervisor.supervision.registration import Registration


async def set_role(
    context: NodeContext, name: str, role: EngineRole, life: Registration[EngineLife], request: Message
) -> Message:
    """Give an engine another role by a new life; raises `BadRequest` for a role that it cannot have.

    Raises `NotReady` if it does not become ready with it.
    """
    await trio.lowlevel.checkpoint()
    assert isinstance(request, SetRole)
    if (why := next(_refusals(context, name, role.section, request.role), None)) is not None:
        raise BadRequest(why, param="role")
    result = await operate_in_tree(OPERATION_OF[SetRole], life, request)
    await role.settled()
    if role.failure:
        raise NotReady(f"it did not start as {request.role}: {role.failure}; it starts again as {role.leg}")
    return result


def _refusals(context: NodeContext, name: str, section: EngineSection, leg: Leg) -> Iterator[str]:
    """Yield the reasons why an engine cannot have a role."""
    kind, cluster = KINDS[section.kind], context.cluster
    if leg is Leg.ENCODE:
        yield "an engine that computes tokens cannot become an encoder"
        return
    if leg.value == section.leg:
        yield f"its role is {leg} already"
    if kind.hand_off is None:
        yield f"an engine of kind {section.kind} computes both legs"
    if len(section.nodes) > 1:
        yield "an engine that spans nodes has the role of its configuration"
    newest = context.directory.newest_weights(section.model).record
    if newest.serial and not newest.folder:
        yield "the weights of its model came as tensors, which its next life would not have"
    if cluster.model[section.model].grid.by_leg:
        yield f"{section.model} has pools, which name the engines of each role"
    changed = with_leg(section, leg)
    path = join("engine", segment(name))
    yield from map(str, cross_checks.engine_mistakes(cluster.with_engine(name, changed), changed, path))
    try:
        kind.check_host(name, changed)
    except StartFailed as error:
        yield str(error)

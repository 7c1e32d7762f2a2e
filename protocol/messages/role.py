"""The change of an engine's role, which is the part of a request that it computes, while its cluster runs."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from protocol.messages.cluster import Leg, serve_text
from protocol.messages.engine import Done
from protocol.messages.kind import Kind
from protocol.messages.leaving import ALL_TAGS, LeavingRequest
from protocol.messages.operation import EngineOperation, OperationScope, WeightsSession


@frozen(kw_only=True)
class SetRole(LeavingRequest):
    """Start an engine again with another role; the result is `Done`, once it is ready.

    An engine that does not become ready starts again with the role that it had, and the operation fails.
    """

    role: Leg  # `both`, `prefill` or `decode`


OPERATIONS = (
    EngineOperation(
        kind=Kind(89, SetRole, result=Done),
        name="set-role",
        participle="given the role",
        summary="Start one engine again with another role: `both`, `prefill` or `decode`.",
        within_s=1800.0,
        path="/set_role",
        scope=OperationScope.ONE,
        leaves_service=True,
        renews=True,
        needs=ALL_TAGS,
        session=WeightsSession.OUTSIDE,
        example={"role": "decode", "running": "drain", "within_s": 60},
    ),
)


def left_unserved(legs: Mapping[str, Leg], engine: str, role: Leg) -> str | None:
    """Return why a model would be left without answers by the new role of one of its engines, None if it would not.

    `legs` has the engines of the model that are in service, by name.
    """
    if serve_text({role, *(leg for name, leg in legs.items() if name != engine)}):
        return None
    return f"no engine in service would be left for {'answers' if role is Leg.PREFILL else 'prompts'} of its model"

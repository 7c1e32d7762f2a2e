"""The record of a mixture of experts: how many tokens each expert of each layer has got.

*Balancedness* is the mean divided by the maximum: 1 if all have the same number of tokens, and close to 0 if one has
nearly all of them.
"""

from __future__ import annotations

from attrs import frozen

from protocol.messages.engine import Done
from protocol.messages.kind import Kind, Message
from protocol.messages.operation import EngineOperation, OperationScope


@frozen
class StartExpertRecord(Message):
    """Count from now on which experts get the tokens; the result is `Done`."""


@frozen
class StopExpertRecord(Message):
    """Count no more, and keep what has been counted; the result is `Done`."""


@frozen
class DumpExpertRecord(Message):
    """Return what has been counted since the start or the last dump, and forget it; the result is `ExpertRecord`."""


@frozen
class ExpertLayer:
    """One layer of a record."""

    layer: int
    routed: int  # choices of an expert: each token has as many as the model has experts a token
    balancedness: float  # between experts
    busiest: int  # the expert with the most tokens
    ranks: tuple[int, ...] = ()  # the tokens of each rank that has a share of the experts; empty: they are not known
    rank_balancedness: float | None = None


@frozen
class ExpertRecord(Message):
    """A record; the file that ends in `.json` has every number, and the picture is in the one that ends in `.svg`."""

    steps: int  # of the engine, with tokens for experts
    routed: int
    layers: tuple[ExpertLayer, ...]  # without those that have no experts
    files: tuple[str, ...]
    picture: str  # a line a layer, with a digit an expert: tenths of the largest number of tokens in the layer


OPERATIONS = (
    EngineOperation(
        kind=Kind(103, StartExpertRecord, result=Done),
        name="start-expert-record",
        participle="asked to record its experts",
        summary="Count which experts of a model get the tokens.",
        within_s=10.0,
        path="/start_expert_record",
    ),
    EngineOperation(
        kind=Kind(104, StopExpertRecord, result=Done),
        name="stop-expert-record",
        participle="asked to record no more",
        summary="End the count of tokens by experts, and keep it.",
        within_s=10.0,
        path="/stop_expert_record",
    ),
    EngineOperation(
        kind=Kind(105, DumpExpertRecord, result=ExpertRecord),
        result_kind=Kind(106, ExpertRecord),
        name="dump-expert-record",
        participle="asked for its record",
        summary="Return the count of tokens by experts, and begin anew.",
        within_s=60.0,
        path="/dump_expert_record",
        scope=OperationScope.ONE,
    ),
)

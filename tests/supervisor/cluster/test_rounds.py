"""The rounds of an operation: none does what one refuses, and what some have done is undone."""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import BadRequest, EngineLost, EngineRefused, NotReady, RequestError
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF, FlushCache
from protocol.messages.weights import BeginWeightsUpdate, CheckWeights, EndWeightsUpdate, UpdateWeightsFromDisk
from supervisor.cluster.rounds import RequestOfEach, in_rounds

DISK = UpdateWeightsFromDisk(folder="/step-5", version="step-5")
BEGIN = BeginWeightsUpdate()


class Asked:
    """Engines that answer `Done`, but for those with an error for a class of requests."""

    def __init__(self, **errors: tuple[type[Message], RequestError]) -> None:
        self.errors = errors
        self.rounds: list[dict[str, Message]] = []

    async def ask_each(self, requests: RequestOfEach) -> dict[str, Message | RequestError]:
        self.rounds.append(dict(requests))
        return {name: self._outcome(name, request) for name, request in requests.items()}

    def _outcome(self, name: str, request: Message) -> Message | RequestError:
        kind, error = self.errors.get(name, (None, None))
        return error if error is not None and type(request) is kind else Done()


async def carried_out(asked: Asked, request: Message, *names: str) -> dict[str, Message | RequestError]:
    return await in_rounds(OPERATION_OF[type(request)], dict.fromkeys(names, request), asked.ask_each)


async def test_an_update_is_carried_out_once_every_engine_would() -> None:
    asked = Asked()
    assert await carried_out(asked, DISK, "a", "b") == {"a": Done(), "b": Done()}
    check = CheckWeights("/step-5", "step-5")
    assert asked.rounds == [{"a": check, "b": check}, {"a": DISK, "b": DISK}]


async def test_no_engine_is_updated_if_one_would_refuse() -> None:
    refusal = BadRequest("there is no such folder")
    asked = Asked(b=(CheckWeights, refusal))
    outcomes = await carried_out(asked, DISK, "a", "b", "c")
    assert len(asked.rounds) == 1
    assert outcomes["b"] is refusal
    for name in "ac":
        error = outcomes[name]
        assert isinstance(error, EngineRefused)
        assert error.detail == "nothing was done, since engine b would not have been updated"


async def test_a_failure_behind_the_rehearsal_leaves_the_others_updated() -> None:
    lost = EngineLost("it ended")
    asked = Asked(b=(UpdateWeightsFromDisk, lost))
    assert await carried_out(asked, DISK, "a", "b") == {"a": Done(), "b": lost}


async def test_one_engine_needs_no_rehearsal_and_an_operation_without_rounds_has_one() -> None:
    requests: list[tuple[Message, Callable[[Asked], bool]]] = [
        (DISK, lambda asked: asked.rounds == [{"a": DISK}]),
        (FlushCache(), lambda asked: asked.rounds == [{"a": FlushCache()}]),
    ]
    for request, is_so in requests:
        asked = Asked()
        assert await carried_out(asked, request, "a") == {"a": Done()}
        assert is_so(asked)


async def test_what_some_have_done_is_undone() -> None:
    late = NotReady("it is starting")
    asked = Asked(b=(BeginWeightsUpdate, late), c=(BeginWeightsUpdate, late))
    outcomes = await carried_out(asked, BEGIN, "a", "b", "c")
    assert asked.rounds[1:] == [{"a": EndWeightsUpdate("")}]
    error = outcomes["a"]
    assert isinstance(error, EngineRefused)
    assert error.detail == "it was undone, since engines b, c could not be updated"
    assert outcomes["b"] is outcomes["c"] is late


async def test_nothing_is_undone_where_none_has_done_it() -> None:
    late = NotReady("it is starting")
    asked = Asked(a=(BeginWeightsUpdate, late), b=(BeginWeightsUpdate, late))
    assert await carried_out(asked, BEGIN, "a", "b") == {"a": late, "b": late}
    assert len(asked.rounds) == 1

"""The newest weights of a model, and the engines that are behind them.

Every directory notes the newest record of each model (`protocol/weights_record.py`), also after the engine that had it
has ended. An engine behind it is out of service on its own node if that node knows of it, and is chosen by no router.
Each routing node brings such engines to the newest weights where those have a folder: `keep_weights`. Several nodes may
try at once, since an engine carries out one update and refuses the other. No node leads, and none has to be there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import trio
from attrs import define, field

from protocol.errors import DeadlineExceeded, EngineRefused, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.cluster import Offer
from protocol.messages.engine import EngineInfo
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF
from protocol.messages.weights import CheckWeights, UpdateWeightsFromDisk, WeightsUpdated, recorded
from protocol.weights_record import FIRST_WEIGHTS, WeightsRecord

log = logging.getLogger(__name__)

FIRST_TRY_S = 3.0  # an update that is on its way to the engine comes before
RETRY_S_MAX = 60.0  # between two attempts that an engine has refused


@define(eq=False)
class NewestWeights:
    """The newest record of one model; each of `followers` is called when there is a newer one."""

    record: WeightsRecord = FIRST_WEIGHTS
    followers: list[Callable[[], None]] = field(factory=list)

    def note(self, record: WeightsRecord) -> None:
        """Note the record of an engine of the model."""
        if record.is_newer(self.record):
            self.record = record
            for follower in tuple(self.followers):
                follower()

    def behind(self, record: WeightsRecord) -> str:
        """Return why an engine with this record is not asked, as the end of a sentence; empty if it is."""
        return record.behind(self.record)


def errors_of_others(
    requests: Mapping[str, Message], models: Mapping[str, str], outcomes: Mapping[str, object]
) -> dict[str, RequestError]:
    """Return the errors of engines that have other weights than the rest of their model after the same update."""
    results = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, WeightsUpdated)}
    records = {name: recorded(FIRST_WEIGHTS, requests[name], result) for name, result in results.items()}
    newest = {model: NewestWeights() for model in models.values()}
    for name, record in records.items():
        newest[models[name]].note(record)
    reasons = {name: newest[models[name]].behind(record) for name, record in records.items()}
    return {name: EngineRefused(f"{why}; it is out of service") for name, why in reasons.items() if why}


class _Worker(Protocol):
    """The part of a worker that is needed to bring its engine new weights."""

    @property
    def model(self) -> str:
        """The model that it serves."""

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine, None if that was never up."""

    @property
    def offer(self) -> Offer:
        """Its offer."""

    async def call(self, request: Message) -> Message | None:
        """Ask its engine."""


class _Directory(Protocol):
    """The part of the directory that `keep_weights` needs."""

    def engines(self) -> Mapping[str, _Worker]:
        """Return one worker of each engine by the engine's name in the cluster."""

    def newest_weights(self, model: str) -> NewestWeights:
        """Return the newest weights of a model."""

    async def wait_changed(self) -> None:
        """Wait until a worker comes, goes or changes."""


async def keep_weights(directory: _Directory, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Bring engines that are behind to the newest weights of their models, until cancelled."""
    behind = set[str]()

    async def bring(name: str) -> None:
        try:
            await _bring(directory, name)
        finally:
            behind.discard(name)

    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            for name in directory.engines():
                if name not in behind and _update(directory, name) is not None:
                    behind.add(name)
                    nursery.start_soon(bring, name)
            await directory.wait_changed()


async def _bring(directory: _Directory, name: str) -> None:
    """Ask an engine for the newest weights until it has them, is gone, or they have no folder."""
    wait_s = FIRST_TRY_S
    while True:
        await trio.sleep(wait_s)
        if (request := _update(directory, name)) is None:
            return
        try:
            with trio.fail_after(OPERATION_OF[UpdateWeightsFromDisk].answered_within_s(request)):
                await directory.engines()[name].call(request)
            log.info("an engine has the weights of its model again", extra={"engine": name, "version": request.version})
            wait_s = min(2 * wait_s, RETRY_S_MAX)  # unless its node does not announce them
        except (Overloaded, NotReady, LinkLost):
            pass  # it is busy, or starting, also because it has failed before
        except (RequestError, trio.TooSlowError) as error:
            why = error if isinstance(error, RequestError) else DeadlineExceeded("it did not answer in time")
            log.warning("an engine stays behind the weights of its model", extra={"engine": name, "reason": why.detail})
            wait_s = min(2 * wait_s, RETRY_S_MAX)


def _update(directory: _Directory, name: str) -> UpdateWeightsFromDisk | None:
    """Return the update that an engine needs, None if it needs none, or can get none."""
    worker = directory.engines().get(name)
    if worker is None or worker.info is None or OPERATION_OF[CheckWeights].name not in worker.info.operations:
        return None  # a node of an older version announces no weights
    newest = directory.newest_weights(worker.model)
    if not newest.record.folder or not newest.behind(worker.offer.weights):
        return None
    record = newest.record
    return UpdateWeightsFromDisk(
        folder=record.folder, version=record.version, serial=record.serial, checksum=record.checksum
    )

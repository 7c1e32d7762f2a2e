"""The weights of a simulated engine: one tensor, and the order of updates that every kind keeps.

It reads no files: a folder stands for weights that are made of its path. `GONE` is the folder that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256

import trio
from attrs import define, field

from actors.engines.handlers import MessageHandler, handler
from actors.engines.simulated.memory_operations import MemoryOperations
from protocol.errors import BadRequest, EngineRefused
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest
from protocol.messages.weights import (
    BeginWeightsUpdate,
    CheckWeights,
    EndWeightsUpdate,
    GetWeightsChecksum,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensors,
    WeightsTaken,
    WeightsUpdated,
    WeightsVersion,
)
from protocol.model_weights import Form, check_forms, forms
from protocol.safetensors import header_of

INDEX: Mapping[str, Form] = {"simulated.weight": Form("F32", (2, 2))}
"""The tensors of every simulated engine."""

GONE = "/gone"
IN_SESSION = "a session of updates is open: end it first"
STEP_S = 0.05  # the time of an update
FIRST = "default"


@define(eq=False)
class SimulatedWeights:
    """The weights of one simulated engine; it stands still by its `memory`, and `flush` drops its prefix cache."""

    memory: MemoryOperations
    flush: Callable[[], None]
    version: str = FIRST
    _content: bytes = b""
    _in_session: bool = field(init=False, default=False)
    _taken: bool = field(init=False, default=False)  # whether a tensor was replaced in the session

    @property
    def handlers(self) -> Mapping[type[Message], MessageHandler]:
        """The handlers of the operations."""
        return dict(
            [
                handler(UpdateWeightsFromDisk, self._from_disk),
                handler(CheckWeights, self._check),
                handler(GetWeightsChecksum, self._checksum),
                handler(SetWeightsVersion, self._set_version),
                handler(BeginWeightsUpdate, self._begin),
                handler(UpdateWeightsFromTensors, self._from_tensors),
                handler(EndWeightsUpdate, self._end),
            ]
        )

    async def _checksum(self, _: GetWeightsChecksum) -> WeightsUpdated:
        await trio.lowlevel.checkpoint()
        return self._present()

    def _present(self) -> WeightsUpdated:
        return WeightsUpdated(self.version, sha256(self._content).hexdigest())

    async def _set_version(self, request: SetWeightsVersion) -> WeightsVersion:
        await trio.lowlevel.checkpoint()
        if request.version:
            if self._in_session:
                raise EngineRefused(IN_SESSION)
            self.version = request.version
        return WeightsVersion(self.version, self._in_session)

    async def _check(self, request: CheckWeights) -> Done:
        await trio.lowlevel.checkpoint()
        self._content_of(request.folder, request.version)
        return Done()

    def _content_of(self, folder: str, version: str) -> bytes:
        """Return the weights of a folder; raises the refusal of one."""
        if self._in_session:
            raise EngineRefused(IN_SESSION)
        if not folder.startswith("/") or folder == GONE:
            raise BadRequest("there is no such folder on the engine's node", param="folder")
        content = folder.encode()
        if version == self.version and content != self._content:
            self._check_new(version)
        return content

    async def _from_disk(self, request: UpdateWeightsFromDisk) -> WeightsUpdated:
        await trio.lowlevel.checkpoint()
        content = self._content_of(request.folder, request.version)
        await self._stand_still(request)
        try:
            await trio.sleep(STEP_S)
            self.version, self._content = request.version, content
        finally:
            self._go_on()
        return self._present()

    async def _begin(self, request: BeginWeightsUpdate) -> Done:
        await trio.lowlevel.checkpoint()
        if self._in_session:
            raise EngineRefused(IN_SESSION)
        await self._stand_still(request)
        self._in_session, self._taken = True, False
        return Done()

    async def _from_tensors(self, request: UpdateWeightsFromTensors) -> WeightsTaken:
        await trio.lowlevel.checkpoint()
        self._check_session()
        data = request.file.data
        header = header_of(data)
        check_forms(INDEX, forms(header))
        self._content, self._taken = bytes(data[header.data_at :]), True
        return WeightsTaken(len(header.tensors), len(self._content))

    async def _end(self, request: EndWeightsUpdate) -> WeightsUpdated:
        await trio.lowlevel.checkpoint()
        self._check_session()
        if self._taken and not request.version:
            raise EngineRefused("tensors were replaced in this session, so its end needs a version", param="version")
        if request.whole and not self._taken:
            raise EngineRefused("replace every tensor, since those before were of older weights: 1 are missing")
        self.version, self._in_session = request.version or self.version, False
        self._go_on()
        return self._present()

    async def _stand_still(self, request: LeavingRequest) -> None:
        self.memory.stand_still(request.running)
        self.memory.updating = True
        self.flush()
        await trio.lowlevel.checkpoint()

    def _go_on(self) -> None:
        self.memory.updating = False
        self.memory.restore()

    def _check_session(self) -> None:
        if not self._in_session:
            raise EngineRefused("no session of updates is open: begin one first")

    def _check_new(self, version: str) -> None:
        if version == self.version:
            raise BadRequest(f"the engine's present weights have the version {version!r} already", param="version")

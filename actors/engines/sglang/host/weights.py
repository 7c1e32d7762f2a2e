"""New weights for the running model: checked here, loaded by the scheduler, and proved by a checksum.

SGLang's scheduler dies of a tensor of a wrong shape, and takes an unknown name for a success. So an update is compared
with the checkpoint of the running model first, and what does not fit is refused. An update that fails after that may
have replaced a part of the weights: the host ends, and the engine starts again with weights that are whole.

One update runs at a time, and the engine stands still for it. Pickles, by which SGLang hands
tensors to its scheduler, are made here and stay between the processes of the host. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from attrs import define, field
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils import MultiprocessingSerializer

from actors.engines.handlers import MessageHandler, handler
from actors.engines.sglang.host.checkpoint import read_checkpoint
from actors.engines.sglang.host.kv import prefix_cache
from actors.engines.sglang.host.listeners import wait_listens
from actors.engines.sglang.host.standstill import Standstill
from actors.engines.sglang.host.weight_tensors import DTYPES, bucket, layout, size_bytes
from protocol.errors import BadRequest, EngineLost, EngineRefused, Overloaded, Unsupported
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest
from protocol.messages.weights import (
    LOAD_WITHIN_S,
    VERSION_LENGTH_MAX,
    BeginWeightsUpdate,
    CheckWeights,
    DestroyWeightsGroup,
    EndWeightsUpdate,
    GetWeightsChecksum,
    InitWeightsGroup,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    UpdateWeightsFromGroup,
    UpdateWeightsFromIpc,
    UpdateWeightsFromTensors,
    WeightsTaken,
    WeightsUpdated,
    WeightsVersion,
)
from protocol.model_weights import Checkpoint, check_checkpoint, check_forms, forms
from protocol.safetensors import header_of

UPDATE, SESSION = "an update of weights", "a session of updates"  # that need the engine to stand still
IN_SESSION = "a session of updates is open: end it first"
SESSION_S = 900.0  # the longest pause in a session of updates
PORT_MAX = 65_535


@define(eq=False)
class WeightUpdates:
    """The weights of one engine; `end` ends the host, with a reason."""

    manager: TokenizerManager
    standstill: Standstill
    end: Callable[[str], object]
    running: Checkpoint | None = None  # None: the engine was not started from safetensors files
    refusal: str = ""  # why the engine takes no new weights at all
    only_from_disk: str = ""  # why it takes none by other ways
    version: str = ""
    loads: bool = False  # whether the scheduler loads weights, and so answers nothing
    _in_session: bool = False
    _taken: set[str] = field(factory=set)  # the names of the tensors that were replaced in the session
    _session_end: asyncio.TimerHandle | None = None
    _groups: set[str] = field(factory=set)
    _alone: asyncio.Lock = field(factory=asyncio.Lock)

    @classmethod
    def of(cls, manager: TokenizerManager, standstill: Standstill, end: Callable[[str], object]) -> WeightUpdates:
        """Return the weights of an engine that has just started, with the index of its checkpoint."""
        arguments = manager.server_args
        refusal = only_from_disk = ""
        running: Checkpoint | None = None
        try:
            running = read_checkpoint(Path(arguments.model_path).absolute())
        except BadRequest as error:
            refusal = f"the running model has no index of its weights: {error.detail}"
        if arguments.nnodes > 1:
            refusal = "an engine that spans nodes takes no new weights"
        elif arguments.speculative_algorithm is not None:
            refusal = "an engine with a draft model takes no new weights"
        if arguments.dp_size > 1:
            only_from_disk = "an engine with data_parallel takes new weights from disk only"
        version = str(manager.config_value("weight_version"))
        return cls(manager, standstill, end, running, refusal, only_from_disk, version)

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
                handler(EndWeightsUpdate, self._end_session),
                handler(InitWeightsGroup, self._init_group),
                handler(UpdateWeightsFromGroup, self._from_group),
                handler(DestroyWeightsGroup, self._destroy_group),
                handler(UpdateWeightsFromIpc, self._from_ipc),
            ]
        )

    # Versions --------------------------------------------------------------------------

    async def _checksum(self, _: GetWeightsChecksum) -> WeightsUpdated:
        async with self._loading():
            return await self._present()

    async def _present(self) -> WeightsUpdated:
        """Return the version and the checksum of the present weights."""
        ok, why, _, checksum = await self.manager.check_weights(CheckWeightsReqInput(action="checksum"))
        if not ok or checksum is None:
            raise EngineRefused(f"the engine has no checksum of its weights: {why}")
        return WeightsUpdated(self.version, f"{layout(self.manager.server_args)}{checksum}")

    async def _set_version(self, request: SetWeightsVersion) -> WeightsVersion:
        if request.version:
            _check_version(request.version)
            if self._in_session:
                raise EngineRefused(IN_SESSION)
            async with self._loading():
                await self._name(request.version)
        return WeightsVersion(self.version, self._in_session)  # noqa: ASYNC910  # a question waits for nothing

    async def _name(self, version: str) -> None:
        """Give the present weights a version; no running request is aborted for it."""
        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self.manager.update_weight_version(request)
        self.version = version

    def _check_new(self, version: str) -> None:
        """Raise `BadRequest` for the version of the present weights: two weights would have one name."""
        _check_version(version)
        if version == self.version:
            raise BadRequest(f"the engine's present weights have the version {version!r} already", param="version")

    # From disk -------------------------------------------------------------------------

    async def _check(self, request: CheckWeights) -> Done:
        await self._check_folder(request.folder, request.version)
        return Done()

    async def _check_folder(self, name: str, version: str) -> None:
        """Raise the refusal of a folder of weights: every one but those that the state of the engine decides later."""
        running = self._takes(by_disk=True)
        if self._in_session:
            raise EngineRefused(IN_SESSION)
        folder = Path(name)
        _check_version(version)
        if version == self.version and folder != Path(self.manager.model_path):
            self._check_new(version)  # the same again may be asked for: its answer may have been lost
        check_checkpoint(running, await asyncio.to_thread(read_checkpoint, folder))

    async def _from_disk(self, request: UpdateWeightsFromDisk) -> WeightsUpdated:
        await self._check_folder(request.folder, request.version)
        async with self._still(request):
            update = UpdateWeightFromDiskReqInput(
                model_path=request.folder, weight_version=request.version, flush_cache=True
            )
            await self._ok(self.manager.update_weights_from_disk(update))
            self.version = request.version
            return await self._present()

    # From tensors ----------------------------------------------------------------------

    async def _begin(self, request: BeginWeightsUpdate) -> Done:
        self._takes()
        if self._in_session:
            raise EngineRefused(IN_SESSION)
        await self.standstill.begin(SESSION, request.running, request.within_s)
        try:
            async with self._loading():
                await self._ok(self.manager.begin_weight_update(BeginWeightUpdateReqInput()))
                self._in_session, self._taken = True, set()
                self._session_goes_on()
        finally:
            if not self._in_session:  # refused, since a checksum is being computed
                await self.standstill.end(SESSION)
        return Done()

    async def _from_tensors(self, request: UpdateWeightsFromTensors) -> WeightsTaken:
        running = self._takes_in_session()
        data = request.file.data
        header = header_of(data)
        check_forms(running.index, forms(header))
        if unknown := sorted({placed.dtype for placed in header.tensors.values()} - DTYPES.keys()):
            raise Unsupported(f"tensors of the dtype {unknown[0]} are loaded from disk only")
        async with self._loading():
            tensors = await asyncio.to_thread(bucket, request.file, header)
            # Each rank takes the memory over from a description of its own.
            ranks = [MultiprocessingSerializer.serialize(tensors) for _ in range(self.manager.server_args.tp_size)]
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=ranks, load_format="flattened_bucket", flush_cache=True
            )
            self._taken |= header.tensors.keys()
            await self._ok(self.manager.update_weights_from_tensor(update))
            self._session_goes_on()
        return WeightsTaken(len(header.tensors), len(data) - header.data_at)

    async def _end_session(self, request: EndWeightsUpdate) -> WeightsUpdated:
        running = self._takes_in_session()
        if request.version:
            _check_version(request.version)
        elif self._taken:
            raise EngineRefused("tensors were replaced in this session, so its end needs a version", param="version")
        if request.whole and (missing := len(running.index.keys() - self._taken)):
            raise EngineRefused(
                f"replace every tensor, since those before were of older weights: {missing} are missing"
            )
        async with self._loading():
            await self._ok(self.manager.end_weight_update(EndWeightUpdateReqInput()))
            if (busy := await prefix_cache.flush(self.manager)) is not None:
                self._spoilt(f"the prefix cache was not flushed: {busy}")
            if request.version:
                await self._name(request.version)
            self._in_session = False
            if self._session_end is not None:
                self._session_end.cancel()
            updated = await self._present()
        await self.standstill.end(SESSION)
        return updated

    def _session_goes_on(self) -> None:
        """Put off the end of a host whose session is left open, since its engine is out of service meanwhile."""
        if self._session_end is not None:
            self._session_end.cancel()
        reason = f"a session of weights was left open for {SESSION_S:g} s"
        self._session_end = asyncio.get_running_loop().call_later(SESSION_S, self.end, reason)

    # From a group, and from CUDA memory ---------------------------------------------------

    async def _init_group(self, request: InitWeightsGroup) -> Done:
        self._takes()
        if request.group in self._groups:
            raise EngineRefused(f"the engine is in a group {request.group!r} already", param="group")
        ranks = self.manager.server_args.tp_size
        if request.rank_offset + ranks > request.world_size:
            raise BadRequest(
                f"the engine's {ranks} ranks from {request.rank_offset} on are not in a group of {request.world_size}",
                param="world_size",
            )
        if not (1 <= request.port <= PORT_MAX and request.rank_offset >= 1 and request.group):
            raise BadRequest("a group has a name, a port from 1 to 65535, and the engine's ranks behind rank 0")
        await wait_listens(request.address, request.port, request.wait_s)
        async with self._still(request):
            ok, why = await self.manager.init_weights_update_group(
                InitWeightsUpdateGroupReqInput(
                    master_address=request.address,
                    master_port=request.port,
                    rank_offset=request.rank_offset,
                    world_size=request.world_size,
                    group_name=request.group,
                    backend=request.backend,
                )
            )
            if not ok:
                raise EngineRefused(f"the engine could not join the group: {_short(why)}")
            self._groups.add(request.group)
        return Done()

    async def _from_group(self, request: UpdateWeightsFromGroup) -> WeightsTaken:
        running = self._takes_in_session()
        self._check_group(request.group)
        if not request.names:
            raise BadRequest("name the tensors that the group sends", param="names")
        unknown = [name for name in request.names if name not in running.index]
        if unknown:
            raise BadRequest(f"{unknown[0][:128]} is no tensor of the model", param="names")
        wanted = [running.index[name] for name in request.names]
        types = [DTYPES.get(form.dtype) for form in wanted]
        if None in types:
            raise Unsupported("tensors of such a dtype are loaded from disk only", param="names")
        async with self._loading():
            update = UpdateWeightsFromDistributedReqInput(
                names=list(request.names),
                dtypes=[str(dtype).removeprefix("torch.") for dtype in types],
                shapes=[list(form.shape) for form in wanted],
                group_name=request.group,
                flush_cache=True,
            )
            self._taken |= {*request.names}
            await self._ok(self.manager.update_weights_from_distributed(update))
            self._session_goes_on()
        sizes = (size_bytes(form.shape, dtype) for form, dtype in zip(wanted, types, strict=True))
        return WeightsTaken(len(wanted), sum(sizes))

    async def _destroy_group(self, request: DestroyWeightsGroup) -> Done:
        self._takes()
        self._check_group(request.group)
        async with self._loading():
            await self._ok(
                self.manager.destroy_weights_update_group(DestroyWeightsUpdateGroupReqInput(group_name=request.group))
            )
            self._groups.discard(request.group)
        return Done()

    def _check_group(self, group: str) -> None:
        if group not in self._groups:
            raise EngineRefused(f"the engine is in no group {group[:128]!r}", param="group")

    async def _from_ipc(self, request: UpdateWeightsFromIpc) -> WeightsUpdated:
        self._takes()
        if self.manager.server_args.device != "cuda":
            raise Unsupported("weights come from CUDA memory to an engine on CUDA devices only")
        if self._in_session:
            raise EngineRefused(IN_SESSION)
        if not request.sockets or not all(socket.startswith("ipc://") for socket in request.sockets.values()):
            raise BadRequest("name the socket of each GPU, as ipc://PATH by its UUID", param="sockets")
        self._check_new(request.version)
        async with self._still(request):
            update = UpdateWeightsFromIPCReqInput(
                zmq_handles=request.sockets, weight_version=request.version, flush_cache=True
            )
            await self._ok(self.manager.update_weights_from_ipc(update))
            self.version = request.version
            return await self._present()

    # What all have in common --------------------------------------------------------------

    def _takes(self, *, by_disk: bool = False) -> Checkpoint:
        """Return the running checkpoint; raises `Unsupported` if the engine takes no weights in this way."""
        if (why := self.refusal or ("" if by_disk else self.only_from_disk)) or self.running is None:
            raise Unsupported(why)
        return self.running

    def _takes_in_session(self) -> Checkpoint:
        running = self._takes()
        if not self._in_session:
            raise EngineRefused("no session of updates is open: begin one first")
        return running

    @asynccontextmanager
    async def _still(self, request: LeavingRequest) -> AsyncIterator[None]:
        """Let the engine stand still for the body, which has the scheduler load weights."""
        await self.standstill.begin(UPDATE, request.running, request.within_s)
        try:
            async with self._loading():
                yield
        finally:
            await self.standstill.end(UPDATE)

    @asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """Let the body ask the scheduler about its weights, as the only one."""
        if self._alone.locked():
            raise Overloaded("another operation on the weights runs")
        async with self._alone:
            self.loads = True
            try:
                async with asyncio.timeout(LOAD_WITHIN_S):  # noqa: ASYNC100  # the body waits for the scheduler
                    yield
            except TimeoutError:
                self._spoilt(f"the scheduler did not answer within {LOAD_WITHIN_S:g} s")
            finally:
                self.loads = False

    async def _ok(self, update: Awaitable[tuple[object, ...]]) -> None:
        """Wait for an answer of the scheduler; one that is no success ends the host."""
        ok, why, *_ = await update
        if not ok:
            self._spoilt(_short(why))

    def _spoilt(self, why: str) -> None:
        """End the host, since a part of its weights may have been replaced; raises `EngineLost`."""
        self.end(f"its weights may be of no version: {why}")
        raise EngineLost(f"the update failed, and the engine starts again with whole weights: {why}")


def _check_version(version: str) -> None:
    if not version.strip() or len(version) > VERSION_LENGTH_MAX or not version.isprintable():
        raise BadRequest("a version has 1 to 128 printable characters", param="version")


def _short(why: object) -> str:
    return str(why).partition("\n")[0][:300]

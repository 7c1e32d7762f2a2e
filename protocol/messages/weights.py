"""Updates of an engine's weights: from a folder, from tensors, by a process group, and by CUDA IPC; their version.

Every update names the *version* of the new weights, which answers report afterwards, and has a *serial* number, by
which the engines of a model end up with one version (`protocol/weights_record.py`). An engine drops its prefix cache
with each update, since KV memory of other weights would change answers. Tensors cross links as one file in the format
`safetensors` (`protocol/safetensors.py`): the receiver compares its header with the running model before any tensor
reaches the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from protocol.errors import BadRequest, EngineRefused, PeerViolation
from protocol.messages.engine import Done
from protocol.messages.kind import Kind, Message
from protocol.messages.leaving import LeavingRequest, MemoryTag
from protocol.messages.operation import EngineOperation, OperationScope, WeightsSession
from protocol.tensors import Dtype, Tensor
from protocol.weights_record import WeightsRecord

LOAD_WITHIN_S = 600.0
"""The limit of an engine's own part of an update, which may wait for a disk or for other processes."""

VERSION_LENGTH_MAX = 128
SERIAL_MAX = 2**52
"""The highest serial number that may be given to an update."""

JOIN_WITHIN_S = 60.0
"""The longest wait for the other processes of a group."""


@frozen(kw_only=True)
class UpdateWeightsFromDisk(LeavingRequest):
    """Load the weights of a folder on the engine's node; the result is `WeightsUpdated`.

    The folder holds a checkpoint with the names, shapes and dtypes of the running model. A `serial` of 0 stands for the
    next one of the model. An engine whose new weights have not the `checksum`, if one is given, is started again.
    """

    folder: str
    version: str
    serial: int = 0
    checksum: str = ""


@frozen
class CheckWeights(Message):
    """Check whether an engine would load the weights of a folder; the result is `Done`."""

    folder: str
    version: str


@frozen
class WeightsUpdated(Message):
    """An engine has new weights; engines of one model have the same `checksum` exactly if their weights are equal."""

    version: str
    checksum: str


@frozen
class GetWeightsChecksum(Message):
    """Compute the checksum of an engine's weights; the result is `WeightsUpdated`, of the present weights."""


@frozen
class SetWeightsVersion(Message):
    """Set the version of the present weights, or ask for it by an empty `version`; the result is `WeightsVersion`."""

    version: str = ""
    serial: int = 0


@frozen
class WeightsVersion(Message):
    """The version of an engine's weights; `updating` in a session of updates."""

    version: str
    updating: bool = False


@frozen(kw_only=True)
class BeginWeightsUpdate(LeavingRequest):
    """Begin a session of updates from tensors or from a group; the result is `Done`.

    The engine is out of service until the session ends.
    """


@frozen
class UpdateWeightsFromTensors(Message):
    """Replace tensors of the running model, within a session; the result is `WeightsTaken`.

    `file` has the bytes of a safetensors file.
    """

    file: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The file as its one attachment."""
        return (self.file,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> UpdateWeightsFromTensors:
        """Return the message with its file replaced."""
        (file,) = tensors
        return UpdateWeightsFromTensors(file)

    def check_tensors(self) -> None:
        """Raise `PeerViolation` unless the file is a row of bytes."""
        if self.file.dtype is not Dtype.UINT8 or len(self.file.shape) != 1:
            raise PeerViolation("a file of weights is a row of bytes")


@frozen
class WeightsTaken(Message):
    """The numbers of tensors and of bytes that an engine has taken from one request of a session."""

    count: int
    size_bytes: int


@frozen
class EndWeightsUpdate(Message):
    """End a session of updates, with the version of the new weights; the result is `WeightsUpdated`.

    An empty `version` gives up a session in which nothing was replaced. With `whole` the end is refused unless every
    tensor was replaced.
    """

    version: str
    serial: int = 0
    checksum: str = ""
    whole: bool = False


@frozen(kw_only=True)
class InitWeightsGroup(LeavingRequest):
    """Join a group of processes that broadcasts weights; the result is `Done`.

    Its rank 0 listens at `address` and `port`, and each rank of the engine is a rank of the group, from `rank_offset`
    on. `backend` is torch's name of it: `gloo` for a CPU, `nccl` for a GPU. The engine waits up to `wait_s` for a
    listener, and then up to `JOIN_WITHIN_S` for the other ranks.
    """

    address: str
    port: int
    world_size: int
    rank_offset: int = 1
    group: str = "weights"
    backend: str = "gloo"
    wait_s: float = 30.0


@frozen
class UpdateWeightsFromGroup(Message):
    """Receive these tensors from rank 0 of a group, within a session; the result is `WeightsTaken`.

    They are broadcast in this order, with the shapes and dtypes of the running model.
    """

    names: tuple[str, ...]
    group: str = "weights"


@frozen
class DestroyWeightsGroup(Message):
    """Leave a group; the result is `Done`."""

    group: str = "weights"


@frozen(kw_only=True)
class UpdateWeightsFromIpc(LeavingRequest):
    """Load weights from CUDA memory of another process; the result is `WeightsUpdated`.

    `sockets` has, by the UUID of each GPU, the socket at which that process describes its memory.
    """

    sockets: dict[str, str]
    version: str
    serial: int = 0
    checksum: str = ""


WeightsUpdate: TypeAlias = UpdateWeightsFromDisk | EndWeightsUpdate | UpdateWeightsFromIpc
"""The requests after which an engine has other weights."""


def recorded(record: WeightsRecord, request: Message, result: Message) -> WeightsRecord:
    """Return the record of an engine's weights after an operation."""
    if isinstance(request, WeightsUpdate) and isinstance(result, WeightsUpdated) and request.version:
        folder = request.folder if isinstance(request, UpdateWeightsFromDisk) else ""
        return WeightsRecord(request.serial or record.serial + 1, request.version, result.checksum, folder)
    if isinstance(request, SetWeightsVersion) and request.version:
        return evolve(record, serial=request.serial or record.serial, version=request.version)
    return record


def numbered(request: Message, newest: WeightsRecord, *, alone: bool) -> Message:
    """Return a request with the serial number of its update, behind the newest record of the model.

    One engine of several, asked `alone` for the version of the model, gets the number and the checksum of the model's
    weights: it joins the others. Raises `BadRequest` if one engine of several alone is to give its weights a new name.
    """
    if not 0 <= getattr(request, "serial", 0) <= SERIAL_MAX:
        raise BadRequest(f"must be from 0 to {SERIAL_MAX}", param="serial")
    if len(getattr(request, "version", "")) > VERSION_LENGTH_MAX:
        raise BadRequest(f"has at most {VERSION_LENGTH_MAX} characters", param="version")
    if getattr(request, "serial", 0):
        check_order(request, newest, newest)
    if isinstance(request, WeightsUpdate) and request.version and not request.serial:
        if alone and newest.serial and request.version == newest.version:
            return evolve(request, serial=newest.serial, checksum=request.checksum or newest.checksum)
        return evolve(request, serial=newest.serial + 1)
    if isinstance(request, SetWeightsVersion) and request.version and not request.serial and newest.serial:
        if alone:
            raise BadRequest("the engines of a model have one version: name the weights of all of them at once")
        return evolve(request, serial=newest.serial + 1)
    return request


def check_order(request: Message, record: WeightsRecord, newest: WeightsRecord) -> None:
    """Raise `EngineRefused` for an update that a newer one has overtaken, and for a new name of older weights.

    `record` has the weights of the engine, `newest` those of its model.
    """
    if isinstance(request, WeightsUpdate) and request.version and request.serial:
        again = (request.serial, request.version) == (newest.serial, newest.version)
        if request.serial <= newest.serial and not again:
            raise EngineRefused(f"a newer update has come before, of version {newest.version!r}; ask again")
    if isinstance(request, SetWeightsVersion) and request.version and record.serial < request.serial - 1:
        raise EngineRefused(f"{record.behind(newest)}: update it first")


def _check_folder(request: Message) -> Message:
    """Return the rehearsal of an update from disk."""
    assert isinstance(request, UpdateWeightsFromDisk)
    return CheckWeights(request.folder, request.version)


def _give_up(_: Message) -> Message:
    """Return the end of a session in which nothing was replaced."""
    return EndWeightsUpdate("")


def _row(kind: Kind, name: str, summary: str, path: str, **rest: object) -> EngineOperation:
    """Return the row of an operation that takes an engine out of service; `rest` replaces the rest of it."""
    fields: dict[str, object] = {
        "kind": kind,
        "name": name,
        "participle": "updated",
        "summary": summary,
        "within_s": LOAD_WITHIN_S,
        "path": path,
        "leaves_service": True,
        "needs": (MemoryTag.WEIGHTS,),
        "session": WeightsSession.OUTSIDE,
        **rest,
    }
    return EngineOperation(**fields)  # type: ignore[arg-type]  # each has the type of its field


OPERATIONS: tuple[EngineOperation, ...] = (
    _row(
        Kind(70, UpdateWeightsFromDisk, result=WeightsUpdated),
        "update-weights-from-disk",
        "Load the weights of a folder on the engine's node.",
        "/update_weights_from_disk",
        result_kind=Kind(71, WeightsUpdated),
        rehearsal=_check_folder,
        example={"folder": "/models/tiny-step-200", "version": "step-200"},
    ),
    EngineOperation(
        kind=Kind(83, CheckWeights, result=Done),
        name="check-weights",
        participle="checked",
        summary="Whether the engine would load the weights of a folder.",
        within_s=60.0,
    ),
    EngineOperation(
        kind=Kind(72, GetWeightsChecksum, result=WeightsUpdated),
        name="weights-checksum",
        participle="read",
        summary="The version of the weights, and a checksum that only equal weights have in common.",
        within_s=LOAD_WITHIN_S,
        needs=(MemoryTag.WEIGHTS,),
        path="/weights_checksum",
        methods=("GET", "POST"),
    ),
    EngineOperation(
        kind=Kind(73, SetWeightsVersion, result=WeightsVersion),
        result_kind=Kind(74, WeightsVersion),
        name="weights-version",
        participle="named",
        summary="The version of the weights, which a new `version` replaces.",
        within_s=10.0,
        changes_info=True,
        session=WeightsSession.FREE,
        path="/weights_version",
        example={"version": "step-200"},
    ),
    _row(
        Kind(75, BeginWeightsUpdate, result=Done),
        "begin-weights-update",
        "Begin a session of updates from tensors or from a group.",
        "/begin_weights_update",
        undo=_give_up,
        example={"running": "hold"},
    ),
    _row(
        Kind(76, UpdateWeightsFromTensors, result=WeightsTaken),
        "update-weights-from-tensors",
        "Replace tensors by those of a safetensors file, within a session.",
        "/update_weights_from_tensors",
        result_kind=Kind(77, WeightsTaken),
        takes_file=True,
        session=WeightsSession.WITHIN,
    ),
    _row(
        Kind(78, EndWeightsUpdate, result=WeightsUpdated),
        "end-weights-update",
        "End a session of updates.",
        "/end_weights_update",
        example={"version": "step-200"},
        session=WeightsSession.WITHIN,
    ),
    _row(
        Kind(79, InitWeightsGroup, result=Done),
        "init-weights-group",
        "Join a group of processes that broadcasts weights.",
        "/init_weights_group",
        scope=OperationScope.ONE,
        participle="joined",
        example={"address": "10.0.0.7", "port": 29500, "world_size": 2},
    ),
    _row(
        Kind(80, UpdateWeightsFromGroup, result=WeightsTaken),
        "update-weights-from-group",
        "Receive tensors from rank 0 of a group, within a session.",
        "/update_weights_from_group",
        example={"names": ["model.norm.weight"]},
        session=WeightsSession.WITHIN,
    ),
    _row(
        Kind(81, DestroyWeightsGroup, result=Done),
        "destroy-weights-group",
        "Leave a group of processes that broadcasts weights.",
        "/destroy_weights_group",
        participle="released",
        example={"group": "weights"},
        session=WeightsSession.FREE,
    ),
    _row(
        Kind(82, UpdateWeightsFromIpc, result=WeightsUpdated),
        "update-weights-from-ipc",
        "Load weights from CUDA memory of another process.",
        "/update_weights_from_ipc",
        scope=OperationScope.ONE,
        example={"sockets": {"GPU-5f1c": "ipc:///tmp/weights.sock"}, "version": "step-200"},
    ),
)

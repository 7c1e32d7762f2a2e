"""NIXL's agent, which reads the memory of other nodes: the part of its interface that is used, and its faults.

The agent is used by one thread alone (`transfer_thread.py`). Ranges of memory are (address, size). Nothing of another
node is unpickled, as NIXL's own `deserialize_descs` would do: another agent is loaded from its own binary description,
and the addresses are checked before they come here.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol, TypeAlias, cast

from attrs import define, field

MODULES = ("nixl_cu12", "nixl_cu13")  # host memory is read without CUDA by either
ADVICE = 'pip install "nixl-cu12>=1.5.1"'
DRAM, BACKEND = "DRAM", "UCX"

Range: TypeAlias = tuple[int, int]
"""An address and a size in bytes."""


class TransferFailed(Exception):
    """The other node's memory cannot be read: it has ended, or what it says of its memory is wrong."""


class NoTransfers(Exception):
    """The package is missing, or it finds no transport on this machine."""


class Registered(Protocol):
    """A registration of memory."""


class Handle(Protocol):
    """A transfer of NIXL."""

    def release(self) -> None:
        """Release it; raises if it is running and cannot be stopped."""


class NixlAgent(Protocol):
    """The used part of `nixl_agent`."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Registered: ...  # noqa: D102
    def deregister_memory(self, dereg_list: Registered) -> None: ...  # noqa: D102
    def get_agent_metadata(self) -> bytes: ...  # noqa: D102
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...  # noqa: D102
    def remove_remote_agent(self, agent: str) -> None: ...  # noqa: D102
    def get_new_notifs(self) -> object: ...  # noqa: D102
    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object: ...  # noqa: D102
    def initialize_xfer(  # noqa: D102
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> Handle: ...
    def transfer(self, handle: Handle) -> str: ...  # noqa: D102
    def check_xfer_state(self, handle: Handle) -> str: ...  # noqa: D102


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping, which must outlive every use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def check_installed() -> None:
    """Raise `NoTransfers` if the package is missing."""
    if not any(find_spec(name) is not None for name in MODULES):
        raise NoTransfers(f"needs the package nixl-cu12: {ADVICE}")


@cache
def _skip_destructors() -> None:
    """Let the process end without the destructors of its libraries.

    One of libnl, which the package brings for UCX, reads freed memory: a process that had an agent would end by a
    segmentation fault, whatever its exit code.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # noqa: SLF001  # the name of the system


@define(eq=False)
class TransferAgent:
    """An agent with UCX between host memories; all errors of the library are `TransferFailed`."""

    name: str
    _agent: NixlAgent = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._agent = _new_agent(_module(), self.name)

    @property
    def description(self) -> bytes:
        """The description for agents of other nodes, with all registered memory."""
        return self._agent.get_agent_metadata()

    def register(self, memory: Range) -> Registered:
        """Register memory: other agents may read it, and transfers may write into it."""
        try:
            return self._agent.register_memory([(*memory, 0, "")], DRAM)
        except Exception as error:
            raise TransferFailed(f"memory of {memory[1]} bytes cannot be registered: {error}") from error

    def deregister(self, registered: Registered) -> None:
        """End a registration."""
        try:
            self._agent.deregister_memory(registered)
        except Exception as error:
            raise TransferFailed(f"memory cannot be given back: {error}") from error

    def load(self, description: bytes) -> str:
        """Load another agent, and return its name."""
        try:
            name = self._agent.add_remote_agent(description)
            return name if isinstance(name, str) else name.decode()
        except Exception as error:
            raise TransferFailed(f"the transfer agent of a node cannot be loaded: {error}") from error

    def unload(self, name: str) -> None:
        """Forget another agent, which no transfer may still be reading."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise TransferFailed(f"the transfer agent of a node cannot be forgotten: {error}") from error

    def progress(self) -> None:
        """Let UCX do what is due: answer other agents, open and close connections.

        Its own thread for that, which NIXL starts by default, takes two thirds of a core while nothing is transferred.
        """
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            raise TransferFailed(f"the transfer engine does not progress: {error}") from error

    def release(self, handle: Handle) -> None:
        """Release a transfer that is over."""
        try:
            handle.release()
        except Exception as error:
            raise TransferFailed(f"a transfer cannot be released: {error}") from error

    def begin(self, name: str, into: Sequence[Range], source: Sequence[Range]) -> Handle:
        """Begin to read ranges of another agent's memory."""
        try:
            descriptors = [self._agent.get_xfer_descs([(*each, 0) for each in side], DRAM) for side in (into, source)]
            handle = self._agent.initialize_xfer("READ", descriptors[0], descriptors[1], name)
            state = self._agent.transfer(handle)
        except Exception as error:
            raise TransferFailed(f"the memory of a node cannot be read: {error}") from error
        if state == "ERR":
            raise TransferFailed("a transfer failed at once")
        return handle

    def is_over(self, handle: Handle) -> bool:
        """Return whether a transfer has moved its bytes; raises if it has failed, after which it writes nothing."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransferFailed(f"the memory of a node could not be read: {error}") from error
        if state == "ERR":
            raise TransferFailed("the memory of a node could not be read")
        return state == "DONE"


def _module() -> ModuleType:
    check_installed()
    raises = logging.raiseExceptions
    try:
        return import_module(next(name for name in MODULES if find_spec(name) is not None))
    except ImportError as error:
        raise NoTransfers(f"the package nixl-cu12 cannot be imported: {error}") from error
    finally:  # the import sets up logging of its own, to the standard output, and changes that of the whole process
        logging.raiseExceptions = raises
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.setLevel(logging.WARNING)
        theirs.propagate = True


def _new_agent(module: ModuleType, name: str) -> NixlAgent:
    try:
        agent = module.nixl_agent(name, module.nixl_agent_config(backends=[BACKEND], enable_prog_thread=False))
    except Exception as error:
        raise NoTransfers(f"NIXL cannot start: {error}") from error
    if BACKEND not in agent.backends:
        raise NoTransfers(f"NIXL has no backend {BACKEND} here")
    _skip_destructors()
    return cast("NixlAgent", agent)

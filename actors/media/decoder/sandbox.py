"""The sandbox of a job's process, with the few system calls left to hijacked code.

It may compute, within limits of processor time, address space and file size, and write into files that it makes in
memory. It may open nothing, connect to nothing, start nothing and signal no process: a filter in the kernel lets it use
the system calls of the list below and no others, and `fcntl` for seals alone, since `fcntl` could have the kernel send
any signal to any process of this user. Nothing here can be undone by the process itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path

from actors.media.jobs import JobLimits

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
DESCRIPTORS_MAX = 16  # a job's
TEMPLATE_DESCRIPTORS_MAX = 4096
NICE = 10  # the priority of decoders: the event loop and engines go first

# The numbers of the system calls that computing and answering take, by the architecture of the machine. Reading is from
# descriptors that are open already; `fcntl` seals files; `futex` and the following are what the C library needs.
_NAMES = (
    *("read", "write", "close", "lseek", "mmap", "mprotect", "munmap", "brk", "rt_sigaction"),
    *("rt_sigprocmask", "rt_sigreturn", "pread64", "writev", "sched_yield", "mremap", "madvise", "getpid"),
    *("sendto", "sendmsg", "exit", "fcntl", "ftruncate", "gettimeofday", "sigaltstack", "gettid", "futex"),
    *("clock_gettime", "exit_group", "sched_getaffinity", "getrandom", "memfd_create", "rseq", "set_robust_list"),
    "restart_syscall",
)
_NUMBERS = {
    "x86_64": (
        *(0, 1, 3, 8, 9, 10, 11, 12, 13, 14, 15, 17, 20, 24, 25, 28, 39, 44, 46, 60, 72, 77, 96, 131, 186, 202),
        *(228, 231, 204, 318, 319, 334, 273, 219),
    ),
    "aarch64": (
        *(63, 64, 57, 62, 222, 226, 215, 214, 134, 135, 139, 67, 66, 124, 216, 233, 172, 206, 211, 93, 25, 46, 169),
        *(132, 178, 98, 113, 94, 123, 278, 279, 293, 99, 128),
    ),
}
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Classic BPF: load a word of the call's description, compare it, return a verdict.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _SECOND_ARGUMENT_AT = 0, 4, 24  # of the argument only its lower half, which comes first
_INSTRUCTION_BYTES = 8
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_LIBC = ctypes.CDLL(None, use_errno=True)


def allowed_calls() -> dict[str, int]:
    """Return the system calls that a job may use, by name; empty on an architecture that is not in the table."""
    return dict(zip(_NAMES, _NUMBERS.get(platform.machine(), ()), strict=False))


def _filter() -> bytes:
    """Return the program of the filter: any other call fails with EPERM, one of another architecture kills."""
    calls = allowed_calls()
    number_of_fcntl = calls.pop("fcntl")
    numbers = tuple(calls.values())
    architecture = _AUDIT_ARCHITECTURES[platform.machine()]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 4, number_of_fcntl),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_JUMP_IF_EQUAL, 0, 1, fcntl.F_ADD_SEALS),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        *((_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def _prctl(option: int, *values: int | ctypes.Array[ctypes.c_char]) -> None:
    if _LIBC.prctl(option, *values, *(0,) * (4 - len(values))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent dies; return whether `parent` is still its parent."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL.value)
    return os.getppid() == parent


def leave_network() -> None:
    """Leave the network of the machine, where the kernel permits that; jobs have the filter besides."""
    for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET):
        if _LIBC.unshare(flags) == 0:
            return


def limit_descriptors() -> None:
    """Limit the descriptors of the template: a job's process closes every number up to the limit, one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > TEMPLATE_DESCRIPTORS_MAX:
        resource.setrlimit(resource.RLIMIT_NOFILE, (TEMPLATE_DESCRIPTORS_MAX, hard))


def own_address_space() -> int:
    """Return the bytes of the address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def keep_descriptors(kept: tuple[int, ...]) -> None:
    """Close every descriptor but these, and let the standard output lead nowhere: it could have a client's content."""
    lower = 3
    for fd in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(lower, fd)
        lower = fd + 1
    for fd in (1, 2):
        os.dup2(0, fd)


def enter(limits: JobLimits, base_bytes: int, *, filtered: bool) -> None:
    """Give up everything but computing; `base_bytes` is the address space that the template has by itself."""
    memory = base_bytes + limits.memory_bytes
    for number, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(number)
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # At the soft limit of processor time it is killed by a signal of its own, by which its end is known.
        beyond = number == resource.RLIMIT_CPU and hard != soft
        resource.setrlimit(number, (soft, soft + beyond))
    with suppress(OSError):
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if filtered:
        code = _filter()
        instructions = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HP", len(code) // _INSTRUCTION_BYTES, ctypes.addressof(instructions))
        _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program, len(program)))

"""The zygote: a process that has imported SGLang once and forks hosts from itself, in a second instead of 13 to 19.

For engines on a CPU only, because CUDA cannot be forked. Its control socket keeps message boundaries: a boot message
with the host's descriptors comes in, and the host's process id with a pidfd goes out, or a sentence why there is no
host. A host that has ended is reaped only when the node has released its process id: until then no other process can
get that id. The zygote dies with its node; the hosts that it forked do not die with it. It may never start a thread,
nor touch a device: neither survives a fork.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from actors.engines.host.watchdog import start_watchdog
from actors.engines.sglang import boot_message

READY = b"ready"
MESSAGE_BYTES_MAX = 128 * 1024
DESCRIPTORS = 4  # inherited by a host
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run as `python -m actors.engines.sglang.host.zygote CONTROL PARENT`: a descriptor, and the node's process id."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # The signal is tied to the thread that forks: the node's main thread, which ends with the node.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_everything()
    control.send(READY)
    released: set[int] = set()  # process ids of hosts that the node no longer watches
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, DESCRIPTORS)
        if not message:
            return
        if message.isdigit():
            released.add(int(message))
        else:
            _answer(control, message, fds)
        released = {pid for pid in released if not _reaped(pid)}


def _answer(control: socket.socket, message: bytes, fds: list[int]) -> None:
    """Fork a host, and reply with its process id and a pidfd, or with a sentence why there is none."""
    try:
        if len(fds) < DESCRIPTORS:
            control.send(b"it has no descriptors left")
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_host(message, fds)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        os.close(pidfd)
    except OSError as error:
        control.send((error.strerror or str(error)).encode())
    finally:
        for fd in fds:
            os.close(fd)


def _import_everything() -> None:
    """Import what a host will need, and make SGLang start its own child processes by fork alone.

    The garbage collector is off meanwhile and never visits the imported objects, which saves a fifth of the time.
    """
    gc.disable()
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.qwen2
    import sglang.srt.models.registry  # noqa: F401

    import actors.engines.sglang.host.embedding.server
    import actors.engines.sglang.host.grammars.grammar_checker
    import actors.engines.sglang.host.server
    import actors.engines.sglang.host.vision.encoder  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    gc.freeze()
    gc.enable()


def _become_host(message: bytes, fds: list[int]) -> None:
    from actors.engines.sglang.host import server
    from actors.engines.sglang.host.embedding import server as embedding_server
    from actors.engines.sglang.host.grammars import grammar_checker
    from actors.engines.sglang.host.vision import encoder

    try:
        os.setsid()
        link, node, log, _lock = fds  # the lock is held, not used
        boot = boot_message.decode(message)
        watchdog = start_watchdog(Path(boot.folder), link, node)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if boot.task is not None:
            host = embedding_server
        else:
            host = encoder if boot.batch_max is not None else server if boot.checks is None else grammar_checker
        host.run(boot, socket.socket(fileno=link), watchdog)
    except BaseException:  # noqa: BLE001  # a fork must never return into its zygote's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def _reaped(pid: int) -> bool:
    """Reap a host, and return whether there is nothing left to reap."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


if __name__ == "__main__":
    main()

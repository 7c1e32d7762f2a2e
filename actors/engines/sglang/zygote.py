"""A process that has imported SGLang once and forks hosts from itself: 1 to 2 s a start instead of 13 to 19.

For engines on a CPU only, because CUDA cannot be forked. It talks to its node over a socket of whole messages: a boot
message with the host's descriptors in, the host's process id with a pidfd out. It dies with its node; the hosts that it
forked do not die with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from actors.engines.sglang import settings
from actors.engines.sglang.guard import stand

READY = b"ready"
MESSAGE_BYTES_MAX = 128 * 1024
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run as `python -m actors.engines.sglang.zygote CONTROL PARENT`: a descriptor, and the node's process id."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # The node forks its zygote from its main thread, whose death is the node's own.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_everything()
    signal.signal(signal.SIGCHLD, _reap)
    control.send(READY)
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 4)
        if not message:
            return
        # Until there is a pidfd nobody may reap the host, else its id might already be somebody else's.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_host(message, fds)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _import_everything() -> None:
    """Import what a host will need, and keep SGLang from starting its children any other way than by fork."""
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.qwen2
    import sglang.srt.models.registry  # noqa: F401

    import actors.engines.sglang.host  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


def _become_host(message: bytes, fds: list[int]) -> None:
    from actors.engines.sglang import host

    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        link, node, log, _lock = fds  # the lock is held, not used
        boot = settings.decode(message)
        guard = stand(Path(boot.folder), link, node)
        os.dup2(log, 1)
        os.dup2(log, 2)
        host.run(boot, socket.socket(fileno=link), guard)
    except BaseException:  # noqa: BLE001  # a fork must never return into its zygote's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def _reap(*_: object) -> None:
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main()

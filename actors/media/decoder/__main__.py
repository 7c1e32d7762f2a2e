"""The template of the decoders: a process that has imported the parsers once, and forks one process for each job.

It never reads a content: a job's process does, in its sandbox, and ends with the job. So no content can reach the
content of another client, and a job is ended by killing its process, at any moment: as soon as the node closes its end
of the job's socket. The template dies with its node, and its jobs die with it. It may never start a thread, which would
not survive a fork.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import NoReturn

from attrs import define, field

from actors.media import jobs
from actors.media.decoder import job, sandbox, trial
from actors.media.jobs import JobEnded

DESCRIPTORS = 2  # a job's: the socket of its answers, its content


@define(eq=False)
class _Running:
    """One job's process."""

    pidfd: int
    answers: socket.socket
    killed: bool = False


@define(eq=False)
class Template:
    """Forks and ends the processes of jobs, as the node asks by the control socket."""

    control: socket.socket
    base_bytes: int
    filtered: bool
    _pid: int = field(factory=os.getpid)
    _poll: select.epoll = field(factory=select.epoll)
    _by_socket: dict[int, _Running] = field(factory=dict)
    _by_pidfd: dict[int, _Running] = field(factory=dict)

    def serve(self) -> None:
        """Run jobs until the node closes the control socket."""
        self._poll.register(self.control, select.EPOLLIN)
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            # The ends of jobs first, and their descriptors before a new job can get one of the same number.
            for fd in ready:
                if (running := self._by_pidfd.get(fd)) is not None:
                    self._ended(running)
                elif (running := self._by_socket.get(fd)) is not None:
                    self._left(running)
            if self.control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self.control, jobs.PACKET_BYTES_MAX, DESCRIPTORS)
                if not message:
                    return
                self._begin(message, fds)

    def _begin(self, message: bytes, fds: list[int]) -> None:
        if len(fds) < DESCRIPTORS:  # this process has no descriptors left: the node sees its end of the socket closed
            for fd in fds:
                os.close(fd)
            return
        answers, content = socket.socket(fileno=fds[0]), fds[1]
        try:
            pid = os.fork()
            if pid == 0:
                self._become_job(message, answers, content)
            self._watch(pid, answers)
        except OSError:
            _send_ended(answers, -1)
            answers.close()
        finally:
            os.close(content)

    def _watch(self, pid: int, answers: socket.socket) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        running = self._by_pidfd[pidfd] = self._by_socket[answers.fileno()] = _Running(pidfd, answers)
        self._poll.register(pidfd, select.EPOLLIN)
        self._poll.register(running.answers, select.EPOLLRDHUP)

    def _left(self, running: _Running) -> None:
        """Kill a job's process, since the node has closed its end."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
        self._poll.unregister(running.answers)
        del self._by_socket[running.answers.fileno()]
        running.killed = True

    def _ended(self, running: _Running) -> None:
        """Reap a job's process, and report its end to the node: it may have answered before."""
        ended = os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED)
        by_signal = ended is not None and ended.si_code != os.CLD_EXITED
        self._poll.unregister(running.pidfd)
        del self._by_pidfd[running.pidfd]
        os.close(running.pidfd)
        if not running.killed:
            self._poll.unregister(running.answers)
            del self._by_socket[running.answers.fileno()]
            _send_ended(running.answers, ended.si_status if ended is not None and by_signal else 0)
        running.answers.close()

    def _become_job(self, message: bytes, answers: socket.socket, content: int) -> NoReturn:
        try:
            wanted = jobs.decode_job(message)
            sandbox.keep_descriptors((answers.fileno(), content))
            os.nice(sandbox.NICE)
            if sandbox.die_with_parent(self._pid):
                sandbox.enter(wanted.limits, self.base_bytes, filtered=self.filtered)
                job.run(wanted.task, answers, content)
        finally:
            os._exit(0)  # a fork must never return into the loop of its template


def _send_ended(answers: socket.socket, number: int) -> None:
    with suppress(OSError):  # the node has left
        answers.send(jobs.encode(JobEnded(number)), socket.MSG_DONTWAIT)


def main() -> None:
    """Run as `python -m actors.media.decoder CONTROL PARENT`: a descriptor, and the node's process id."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    sandbox.leave_network()
    sandbox.limit_descriptors()
    if not sandbox.die_with_parent(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # about corrupt metadata: serious faults are errors
    gc.collect()
    gc.freeze()
    gc.disable()  # here alone: a job that ends soon needs no collector either
    base_bytes = sandbox.own_address_space()
    filtered = trial.passes(base_bytes, filtered=True)
    if not filtered and not trial.passes(base_bytes, filtered=False):
        sys.exit("a trial image could not be decoded in the sandbox of decoders")
    missing = b"" if filtered else b"an image could be decoded only without the filter of system calls"
    control.send(jobs.READY + missing)
    Template(control, base_bytes, filtered).serve()


if __name__ == "__main__":
    main()

"""File descriptors: counted before anything starts, kept in reserve, and refused to strangers when there are none."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import Overloaded, StartFailed
from supervisor.config.limits import TextLimits
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.launcher import preflight
from supervisor.node import descriptor_needs, preview
from supervisor.sockets.descriptor_reserve import GuardedListener, Reserve
from supervisor.threads.text_threads import TextThreads
from tests.supervisor.engines.sglang.test_ranks_configuration import ROOT

ONE = f"""
[gateway]
port = 0
[gateway.limits]
connections_max = 1000
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
[engine.a]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.toml").write_text(ONE)
    return read_cluster(tmp_path / "cluster.toml")


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch):
    """A process that may have so many descriptors, and may ask for so many."""
    limits = [0, 0]

    def limit(soft, hard) -> None:
        limits[:] = soft, hard

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit(*new))
    limit.now = limits  # type: ignore[attr-defined]
    return limit


def test_b6_a_node_that_may_not_have_the_descriptors_that_its_file_allows_is_refused(cluster: Cluster, limited) -> None:
    limited(1024, 1024)
    sentence = (
        r"^node main may need 1,224 file descriptors, and its process may have 1,024: 1,000 for connections \+ 16 for"
        r" engines \+ 128 for listeners \+ 64 for the process \+ 16 for the reserve; raise the limit \(ulimit -n\), or"
        r" lower gateway\.limits\.connections_max$"
    )
    with pytest.raises(StartFailed, match=sentence):
        preview.describe_node(cluster, "main", {})
    with pytest.raises(StartFailed, match=sentence):
        preflight.check_can_start(cluster, "main")
    limited(1224, 1224)
    assert "file descriptors: 1,224 at most: 1,000 for connections + " in preview.describe_node(cluster, "main", {})
    limited(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    preflight.check_can_start(cluster, "main")


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 524_288, 524_288),
        (1024, 1_073_741_816, 1_048_576),
        (1024, resource.RLIM_INFINITY, 1_048_576),
        (2_000_000, 4_000_000, 2_000_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_b6_the_limit_is_raised_as_far_as_it_may_be(limited, soft: int, hard: int, raised: int) -> None:
    limited(soft, hard)
    descriptor_needs.raise_limit()
    assert limited.now == [raised, hard]


class Full:
    """A machine with so many descriptors, of which this test's reserve and connections take some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.next = free, 1000
        monkeypatch.setattr(os, "open", lambda *_: self.take())
        monkeypatch.setattr(os, "close", lambda _: self.give())

    def take(self) -> int:
        if self.free == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        self.free -= 1
        self.next += 1
        return self.next

    def give(self) -> None:
        self.free += 1


class Stream:
    def __init__(self, machine, number: int) -> None:
        self.machine, self.number, self.said, self.open = machine, number, b"", True
        self.socket = self

    async def recv(self, _) -> bytes:
        return b"GET / HTTP/1.1"

    async def send(self, data) -> None:
        self.said += data

    def close(self) -> None:
        if self.open:
            self.open = False
            self.machine.give()


class Listener:
    """A listening socket at which somebody always knocks."""

    def __init__(self, machine) -> None:
        self.machine, self.accepted = machine, []
        self.socket = self

    async def accept(self):
        await trio.lowlevel.checkpoint()
        self.machine.take()
        self.accepted.append(Stream(self.machine, len(self.accepted)))
        return self.accepted[-1]

    async def aclose(self): ...


@pytest.fixture
def knocked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def readable(_) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(trio.lowlevel, "wait_readable", readable)


async def taken(guarded, seconds):
    """Accept for so many seconds, and return whom the listener let in."""
    let_in = []
    with trio.move_on_after(seconds):
        while True:
            let_in.append(await guarded.accept())
    return let_in


async def test_b6_connections_take_all_descriptors_but_the_reserve(
    monkeypatch: pytest.MonkeyPatch, knocked: None, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Full(monkeypatch, 10)
    kept, listener, refused = Reserve(4), Listener(machine), []
    guarded = GuardedListener(listener, kept, lambda: refused.append(1), b"no")
    let_in = await taken(guarded, 1)
    assert len(let_in) == 6
    assert len(refused) == 20  # one every 50 ms, however many knock
    assert {each.said for each in listener.accepted if each not in let_in} == {b"no"}
    assert not any(each.open for each in listener.accepted if each not in let_in)
    assert (machine.free, kept.fill()) == (0, True)
    assert [record.getMessage() for record in caplog.records] == [
        "no file descriptors are left: connections are refused"
    ]
    let_in[0].close()
    assert len(await taken(guarded, 1)) == 1


async def test_b6_what_has_eaten_the_reserve_too_stops_no_listener(
    monkeypatch: pytest.MonkeyPatch, knocked: None, autojump_clock: MockClock
) -> None:
    machine = Full(monkeypatch, 0)
    guarded = GuardedListener(Listener(machine), Reserve(4))
    assert await taken(guarded, 1) == []
    machine.free = 5  # of which the reserve takes four
    assert len(await taken(guarded, 1)) == 1


async def test_b6_who_has_borrowed_the_reserve_has_it_alone(
    monkeypatch: pytest.MonkeyPatch, knocked: None, autojump_clock: MockClock
) -> None:
    machine = Full(monkeypatch, 4)
    kept = Reserve(4)
    assert kept.fill()
    guarded = GuardedListener(Listener(machine), kept)
    with kept.lend():
        assert machine.free == 4
        assert await taken(guarded, 1) == []
        for _ in range(4):
            machine.take()
    assert not kept.fill()
    machine.free = 4
    assert kept.fill()


async def test_b6_loans_of_the_reserve_that_overlap_end_in_any_order(
    monkeypatch: pytest.MonkeyPatch, knocked: None, autojump_clock: MockClock
) -> None:
    """Two engines that start, or one and a connection that is refused: no listener may be deaf afterwards."""
    machine, kept = Full(monkeypatch, 9), Reserve(4)
    assert kept.fill()
    first, second = kept.lend(), kept.lend()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kept.lending
    assert machine.free == 9  # the second still has them all
    second.__exit__(None, None, None)
    assert not kept.lending
    with kept.lend():
        pass
    assert len(await taken(GuardedListener(Listener(machine), kept), 1)) == 5


async def test_an_error_of_a_listener_that_is_no_famine_is_its_own(
    monkeypatch: pytest.MonkeyPatch, knocked: None, autojump_clock: MockClock
) -> None:
    machine = Full(monkeypatch, 9)

    async def accept():
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EBADF, "it is closed")

    listener = Listener(machine)
    listener.accept = accept
    with pytest.raises(OSError, match="it is closed"):
        await GuardedListener(listener, Reserve(4)).accept()


async def test_b6_without_a_thread_a_request_fails_as_overloaded_and_the_next_may_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody counts it as a bug: a rate of those would restart the processor, and in the end the node."""
    threads, failing = TextThreads(TextLimits()), [True]
    start_new = threading.Thread.start

    def start(self) -> None:
        if failing:
            raise RuntimeError("can't start new thread")
        start_new(self)

    monkeypatch.setattr(trio._core._thread_cache, "IDLE_TIMEOUT", 0.01)
    monkeypatch.setattr(trio._core._thread_cache.THREAD_CACHE, "_idle_workers", {})
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Overloaded, match="no thread left"):
        await threads(lambda: 1, owner="alice", size=1)
    assert (threads.running, threads.waiting) == (0, 0)
    failing.clear()
    assert await threads(lambda: 2, owner="alice", size=1) == 2

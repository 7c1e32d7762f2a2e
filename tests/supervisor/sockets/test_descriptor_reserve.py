"""A listener keeps descriptors in reserve, and refuses connections when no others are left."""

from __future__ import annotations

import errno
import os
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from supervisor.sockets.descriptor_reserve import DescriptorReserve, GuardedListener


class Full:
    """A machine with a number of free descriptors, which a reserve and connections take."""

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
    def __init__(self, machine: Full, number: int) -> None:
        self.machine, self.number, self.sent, self.open = machine, number, b"", True
        self.socket = self

    async def recv(self, _: object) -> bytes:
        return b"GET / HTTP/1.1"

    async def send(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        if self.open:
            self.open = False
            self.machine.give()


class Listener:
    """A listening socket with a connection to accept at any time."""

    def __init__(self, machine: Full) -> None:
        self.machine = machine
        self.accepted: list[Stream] = []
        self.socket = self

    async def accept(self) -> Stream:
        await trio.lowlevel.checkpoint()
        self.machine.take()
        self.accepted.append(Stream(self.machine, len(self.accepted)))
        return self.accepted[-1]

    async def aclose(self) -> None: ...


def guard(listener: Listener, *more: Any) -> GuardedListener:
    return GuardedListener(cast("trio.SocketListener", listener), *more)


@pytest.fixture
def always_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def readable(_: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(trio.lowlevel, "wait_readable", readable)


async def accepted(guarded: GuardedListener, seconds: float) -> list[Any]:
    """Accept for some seconds, and return the connections that the listener has accepted."""
    let_in = []
    with trio.move_on_after(seconds):
        while True:
            let_in.append(await guarded.accept())
    return let_in


async def test_connections_take_all_descriptors_but_the_reserve(
    monkeypatch: pytest.MonkeyPatch, always_readable: None, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Full(monkeypatch, 10)
    kept, listener = DescriptorReserve(4), Listener(machine)
    refused: list[int] = []
    guarded = guard(listener, kept, lambda: refused.append(1), b"no")
    let_in = await accepted(guarded, 1)
    assert len(let_in) == 6
    assert len(refused) == 20  # one every 50 ms, however many connect
    assert {stream.sent for stream in listener.accepted if stream not in let_in} == {b"no"}
    assert not any(stream.open for stream in listener.accepted if stream not in let_in)
    assert (machine.free, kept.fill()) == (0, True)
    assert [record.getMessage() for record in caplog.records] == [
        "no file descriptors are left: connections are refused"
    ]
    let_in[0].close()
    assert len(await accepted(guarded, 1)) == 1


async def test_a_listener_goes_on_after_even_the_reserve_was_taken(
    monkeypatch: pytest.MonkeyPatch, always_readable: None, autojump_clock: MockClock
) -> None:
    machine = Full(monkeypatch, 0)
    guarded = guard(Listener(machine), DescriptorReserve(4))
    assert await accepted(guarded, 1) == []
    machine.free = 5  # of which the reserve takes four
    assert len(await accepted(guarded, 1)) == 1


async def test_a_reserve_that_is_lent_is_left_to_its_borrower(
    monkeypatch: pytest.MonkeyPatch, always_readable: None, autojump_clock: MockClock
) -> None:
    machine = Full(monkeypatch, 4)
    kept = DescriptorReserve(4)
    assert kept.fill()
    guarded = guard(Listener(machine), kept)
    with kept.lend():
        assert machine.free == 4
        assert await accepted(guarded, 1) == []
        for _ in range(4):
            machine.take()
    assert not kept.fill()
    machine.free = 4
    assert kept.fill()


async def test_overlapping_loans_of_the_reserve_end_in_any_order(
    monkeypatch: pytest.MonkeyPatch, always_readable: None, autojump_clock: MockClock
) -> None:
    machine, kept = Full(monkeypatch, 9), DescriptorReserve(4)
    assert kept.fill()
    first, second = kept.lend(), kept.lend()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (kept.lending, machine.free) == (True, 9)  # the second still has them all
    second.__exit__(None, None, None)
    assert (kept.lending, machine.free) == (False, 5)
    with kept.lend():
        pass
    assert len(await accepted(guard(Listener(machine), kept), 1)) == 5
